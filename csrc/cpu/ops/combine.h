// Combine of one token, for the ops that end in it.
#pragma once

#include "core.h"

namespace moefuse {

// acc [H] holds the weighted sum: adds shared and residual, writes out and normed of token t.
void finish_token(const Tail& tail, const Outputs& outputs, int64_t t, int64_t H, float* acc);

}  // namespace moefuse
