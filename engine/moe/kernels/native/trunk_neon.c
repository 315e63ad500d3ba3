#include "trunk_internal.h"

#if defined(__aarch64__)
#define NAME(name) name##_neon
#define LANES 4
#define TILE_VECTORS 4
#include "attention_template.h"
#else
typedef int trunk_neon_is_empty;
#endif
