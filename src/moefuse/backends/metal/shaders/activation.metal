// Activations: one function glu_<kind> for each kind in moefuse/types.py, value and derivatives together.
// codes.py finds the functions by their names and writes ACTIVATIONS, the list that activate() chooses from.

struct ActivationNumbers {
    float alpha;
    float limit;
};

// up is 1 where nothing is gated.
struct GluInputs {
    float gate_proj;
    float up;
    bool gated;
    float alpha;
    float limit;
};

// act(gate_proj) * up, and its derivatives by gate_proj and by up, which is 0 where up was clamped.
struct Glu {
    float value;
    float by_gate_proj;
    float by_up;
    bool up_clamped;
};

// act(gate_proj) alone.
struct ValueAndDerivative {
    float value;
    float derivative;
};

inline Glu times_up(ValueAndDerivative act, float up) {
    return Glu{act.value * up, act.derivative * up, act.value, false};
}

// Below this every smooth kind is zero; the clamp keeps -inf * 0 from becoming NaN.
constant float LOWEST = -1000.0f;

// What a * b lacks when it is rounded to p.
inline float product_rest(float a, float b, float p) { return fma(a, b, -p); }

// sigmoid(x + low), and one minus it.
struct SigmoidParts {
    Parts value;
    Parts other;
};

inline SigmoidParts sigmoid_parts(float x, float low) {
    bool below = x < 0.0f;
    Parts t = exp_parts(at_least(-fabs(x), -200.0f), below ? low : -low);
    Parts large = {1.0f / (1.0f + number(t)), 0};
    Parts small = {t.p * large.p, t.k};
    SigmoidParts found = {below ? small : large, below ? large : small};
    return found;
}

// g * sigmoid(y + low) and its derivative by g; bend is g times the derivative of y.
inline ValueAndDerivative sigmoid_unit(float g, float y, float low, float bend) {
    SigmoidParts s = sigmoid_parts(y, low);
    return ValueAndDerivative{times_power(g * s.value.p, s.value.k),
                              times_power(s.value.p * (1.0f + number(s.other) * bend), s.value.k)};
}

inline Glu glu_silu(GluInputs in) {
    float g = at_least(in.gate_proj, LOWEST);
    return times_up(sigmoid_unit(g, g, 0.0f, g), in.up);
}

// 0.5 (1 + tanh(u)) is sigmoid(2u), which loses nothing in the negative tail; 2u comes in two parts. Of its
// coefficients 2 sqrt(2 / pi) and 0.044715 times that, each is a float and a remainder.
inline Glu glu_gelu_tanh(GluInputs in) {
    float g = at_least(in.gate_proj, LOWEST);
    float c = at_most(g, 1000.0f);
    float square = c * c;
    float scaled = 0.07135481387376785f * square;
    float total = 1.5957691669464111f + scaled;
    float back = total - 1.5957691669464111f;
    float lacking = (1.5957691669464111f - (total - back)) + (scaled - back);
    lacking += product_rest(0.07135481387376785f, square, scaled) + 0.07135481387376785f * product_rest(c, c, square);
    lacking += 2.39883e-09f * square - 4.53406803e-08f;
    float y = c * total;
    float low = product_rest(c, total, y) + c * lacking;
    float bend = 1.5957691216f * c * (1.0f + 0.134145f * square);
    return times_up(sigmoid_unit(g, y, low, bend), in.up);
}

// The chance q of a normal number beyond a >= 0, over exp(-a*a/2) which is p * 2**k. MSL has no erfc; the fit in
// 1 / (1 + a/4) is within 3e-7.
inline float normal_tail(float a) {
    float t = 1.0f / (1.0f + 0.25f * a);
    float q = 0.0160714734f * t - 0.0602258529f;
    q = q * t + 0.0461199372f;
    q = q * t + 0.0350751543f;
    q = q * t + 0.00786620334f;
    q = q * t + 0.0888593596f;
    q = q * t + 0.0713885712f;
    q = q * t + 0.0956115754f;
    q = q * t + 0.0994855684f;
    q = q * t + 0.0997480127f;
    return q * t;
}

inline Glu glu_gelu(GluInputs in) {
    float g = in.gate_proj;
    float a = at_most(fabs(g), 20.0f);
    float square = a * a;
    Parts density = exp_parts(-0.5f * square, -0.5f * product_rest(a, a, square));
    float q = normal_tail(a);
    float bent = times_power(density.p * (q - 0.3989422804f * a), density.k);
    ValueAndDerivative act = {g * (1.0f - times_power(q * density.p, density.k)), 1.0f - bent};
    if (g < 0.0f) {
        act.value = times_power(at_least(g, -1000.0f) * (q * density.p), density.k);
        act.derivative = bent;
    }
    return times_up(act, in.up);
}

inline Glu glu_relu(GluInputs in) {
    return times_up(ValueAndDerivative{at_least(in.gate_proj, 0.0f), in.gate_proj > 0.0f ? 1.0f : 0.0f}, in.up);
}

inline Glu glu_relu2(GluInputs in) {
    float r = at_least(in.gate_proj, 0.0f);
    // r * (r * up), so that a large gate and a zero up give 0, not inf * 0.
    return Glu{r * (r * in.up), 2.0f * r * in.up, r * r, false};
}

inline float clamped_up(GluInputs in) { return at_least(at_most(in.up, in.limit), -in.limit); }

// silu of the clamped gate, by a factor that is made of the clamped up.
inline Glu clamped(GluInputs in, float alpha, float factor) {
    float c = at_least(at_most(in.gate_proj, in.limit), LOWEST / alpha);
    float y = alpha * c;
    ValueAndDerivative act = sigmoid_unit(c, y, product_rest(alpha, c, y), y);
    if (in.gate_proj > in.limit) act.derivative = 0.0f;
    Glu found = times_up(act, in.gated ? factor : 1.0f);
    found.up_clamped = fabs(in.up) > in.limit;
    return found;
}

inline Glu glu_swiglu_oai(GluInputs in) { return clamped(in, in.alpha, clamped_up(in) + 1.0f); }

inline Glu glu_swiglu_clamp(GluInputs in) { return clamped(in, 1.0f, clamped_up(in)); }

// A kind that is not here gives NaN.
inline Glu activate(int kind, bool gated, float gate_proj, float up, constant ActivationNumbers& numbers) {
    GluInputs in = {gate_proj, gated ? up : 1.0f, gated, numbers.alpha, numbers.limit};
#define CHOOSE(code, name) \
    case code: return glu_##name(in);
    switch (kind) { ACTIVATIONS(CHOOSE) }
#undef CHOOSE
    return Glu{not_a_number(), not_a_number(), not_a_number(), false};
}
