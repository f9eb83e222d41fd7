// Products with F16 weights.
#include "matmul.h"

MATMUL_KERNELS(f16, F16)
