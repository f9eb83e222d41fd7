// Products with Q4_0 weights.
#include "matmul.h"

MATMUL_KERNELS(q4_0, Q4_0)
