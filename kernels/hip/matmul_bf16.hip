// Products with BF16 weights.
#include "matmul.h"

MATMUL_KERNELS(bf16, BF16)
