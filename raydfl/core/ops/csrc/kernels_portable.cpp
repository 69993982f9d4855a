// The kernels for any CPU: vectors of 4 floats.

#define RAYDFL_KERNELS portable_kernels
#define RAYDFL_NAME "portable"
#define RAYDFL_LANES 4
#include "kernels_body.h"
