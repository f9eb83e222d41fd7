// Products with Q3_K weights.
#include "matmul.h"

MATMUL_KERNELS(q3_k, Q3_K)
