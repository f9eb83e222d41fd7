// Products with Q8_0 weights.
#include "matmul.h"

MATMUL_KERNELS(q8_0, Q8_0)
