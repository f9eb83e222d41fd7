// Products with Q5_0 weights.
#include "matmul.h"

MATMUL_KERNELS(q5_0, Q5_0)
