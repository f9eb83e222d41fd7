// Products with IQ4_NL weights.
#include "matmul.h"

MATMUL_KERNELS(iq4_nl, IQ4_NL)
