// Products with IQ4_NL weights.
#include "gemm.h"

QUANT_KERNELS(iq4_nl, IQ4_NL)
