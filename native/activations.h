// The activations of gated layers, by the number an instruction gives: 0 silu, 1 gelu (tanh form), 2 gelu (erf form).
#pragma once

#include "simd.h"

namespace samovar::SAMOVAR_ISA {

enum Activation { SILU = 0, GELU_TANH = 1, GELU_ERF = 2 };

// erf(x) with an absolute error under 2e-7: a polynomial in 1 / (1 + p|x|), Abramowitz & Stegun, formula 7.1.26.
SAMOVAR_INLINE F32 erf(F32 x) {
    F32 magnitude = x < 0.f ? -x : x;
    F32 t = 1.f / (1.f + 0.3275911f * magnitude);
    F32 y = splat(1.061405429f);
    y = fma(y, t, splat(-1.453152027f));
    y = fma(y, t, splat(1.421413741f));
    y = fma(y, t, splat(-0.284496736f));
    y = fma(y, t, splat(0.254829592f));
    y = 1.f - y * t * exp(-magnitude * magnitude);
    return x < 0.f ? -y : y;
}

SAMOVAR_INLINE F32 gelu_erf(F32 x) { return 0.5f * x * (1.f + erf(0.7071067812f * x)); }

SAMOVAR_INLINE F32 activate(int kind, F32 x) {
    switch (kind) {
        case SILU: return silu(x);
        case GELU_TANH: return gelu_tanh(x);
        default: return gelu_erf(x);
    }
}

}  // namespace samovar::SAMOVAR_ISA
