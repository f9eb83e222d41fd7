// Products with IQ4_XS weights.
#include "gemm.h"

QUANT_KERNELS(iq4_xs, IQ4_XS)
