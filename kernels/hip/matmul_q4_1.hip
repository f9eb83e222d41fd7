// Products with Q4_1 weights.
#include "matmul.h"

MATMUL_KERNELS(q4_1, Q4_1)
