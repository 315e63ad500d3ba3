#include "trunk_internal.h"

#define NAME(name) name##_scalar
#define LANES 4
#define TILE_VECTORS 4
#include "attention_template.h"
