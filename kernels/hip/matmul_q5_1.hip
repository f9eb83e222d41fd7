// Products with Q5_1 weights.
#include "matmul.h"

MATMUL_KERNELS(q5_1, Q5_1)
