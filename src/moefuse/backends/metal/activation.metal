// glu and its gradient, element by element. Macro: X_T.
// Grid of both: columns rounded up to 256, by rows.

struct GluSizes {
    long width;
    long stride_row;
    long stride_column;
    long kind;
    long gated;
};

struct GluNumbers {
    float alpha;
    float limit;
};

// gate, up: elements at row * stride_row + column * stride_column of their own buffers; out [rows, width].
kernel void glu(
    device const X_T* gate [[buffer(0)]],
    device const X_T* up [[buffer(1)]],
    device X_T* out [[buffer(2)]],
    constant GluSizes& sizes [[buffer(3)]],
    constant GluNumbers& numbers [[buffer(4)]],
    uint3 position [[thread_position_in_grid]]) {
    long column = long(position.x);
    if (column >= sizes.width) return;
    long at = long(position.y) * sizes.stride_row + column * sizes.stride_column;
    bool gated = sizes.gated != 0;
    float u = gated ? float(up[at]) : 0.0f;
    float value = activate(int(sizes.kind), gated, float(gate[at]), u, numbers.alpha, numbers.limit);
    out[long(position.y) * sizes.width + column] = X_T(value);
}

// d_gate, d_up: as gate and up, with the same strides. grad [rows, width].
kernel void glu_backward(
    device const X_T* grad [[buffer(0)]],
    device const X_T* gate [[buffer(1)]],
    device const X_T* up [[buffer(2)]],
    device X_T* d_gate [[buffer(3)]],
    device X_T* d_up [[buffer(4)]],
    constant GluSizes& sizes [[buffer(5)]],
    constant GluNumbers& numbers [[buffer(6)]],
    uint3 position [[thread_position_in_grid]]) {
    long column = long(position.x);
    if (column >= sizes.width) return;
    long at = long(position.y) * sizes.stride_row + column * sizes.stride_column;
    int kind = int(sizes.kind);
    float d = float(grad[long(position.y) * sizes.width + column]);
    float g = float(gate[at]);
    ValueAndSlope act = value_and_slope(kind, g, numbers.alpha, numbers.limit);
    float by_gate = act.slope;
    if (sizes.gated != 0) {
        float u = float(up[at]);
        by_gate *= activation_factor(kind, u, numbers.limit);
        bool clamped = (kind == SWIGLU_OAI || kind == SWIGLU_CLAMP) && fabs(u) > numbers.limit;
        d_up[at] = X_T(clamped ? 0.0f : d * act.value);
    }
    d_gate[at] = X_T(d * by_gate);
}
