// Products with Q5_K weights.
#include "matmul.h"

MATMUL_KERNELS(q5_k, Q5_K)
