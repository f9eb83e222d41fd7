// Products with IQ4_XS weights.
#include "matmul.h"

MATMUL_KERNELS(iq4_xs, IQ4_XS)
