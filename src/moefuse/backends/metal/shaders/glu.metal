// glu and its gradient, element by element; needs activation.metal before it. Macro: X_T.
// Grid of both: columns rounded up to 256, by rows.

struct GluSizes {
    long width;
    long stride_row;
    long stride_column;
    long kind;
    long gated;
};

// gate_proj, up: elements at row * stride_row + column * stride_column of their own buffers; out [rows, width].
kernel void glu(
    device const X_T* gate_proj [[buffer(0)]],
    device const X_T* up [[buffer(1)]],
    device X_T* out [[buffer(2)]],
    constant GluSizes& sizes [[buffer(3)]],
    constant ActivationNumbers& numbers [[buffer(4)]],
    uint3 position [[thread_position_in_grid]]) {
    long column = long(position.x);
    if (column >= sizes.width) return;
    long at = long(position.y) * sizes.stride_row + column * sizes.stride_column;
    bool gated = sizes.gated != 0;
    float u = gated ? float(up[at]) : 0.0f;
    float value = activate(int(sizes.kind), gated, float(gate_proj[at]), u, numbers).value;
    out[long(position.y) * sizes.width + column] = X_T(value);
}

// d_gate_proj, d_up: as gate_proj and up, with the same strides. grad [rows, width].
kernel void glu_backward(
    device const X_T* grad [[buffer(0)]],
    device const X_T* gate_proj [[buffer(1)]],
    device const X_T* up [[buffer(2)]],
    device X_T* d_gate_proj [[buffer(3)]],
    device X_T* d_up [[buffer(4)]],
    constant GluSizes& sizes [[buffer(5)]],
    constant ActivationNumbers& numbers [[buffer(6)]],
    uint3 position [[thread_position_in_grid]]) {
    long column = long(position.x);
    if (column >= sizes.width) return;
    long at = long(position.y) * sizes.stride_row + column * sizes.stride_column;
    bool gated = sizes.gated != 0;
    float u = gated ? float(up[at]) : 0.0f;
    float d = float(grad[long(position.y) * sizes.width + column]);
    Glu found = activate(int(sizes.kind), gated, float(gate_proj[at]), u, numbers);
    d_gate_proj[at] = X_T(d * found.by_gate_proj);
    if (gated) d_up[at] = X_T(found.up_clamped ? 0.0f : d * found.by_up);
}
