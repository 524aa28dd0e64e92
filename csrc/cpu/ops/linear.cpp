// linear: rows times up to four weights, each task a few columns of one of them.
#include <algorithm>

#include "ops/grouped.h"
#include "runtime/scratch.h"

namespace moefuse {
namespace {

// Up to this many elements the caller packs alone, rather than have all threads meet once more.
constexpr int64_t kPackAlone = 16384;

// One of the weights: the grouped product of a single expert.
struct Part {
  const Weight& weight;
  Tensor bias;
  Packed packed;
  Grid grid;
  int64_t column;      // where its first column stands in the result
  int64_t first_task;

  const char* first_row(int64_t task) const { return row_of(weight, 0, grid.cell(task - first_task).column); }
};

class Product {
 public:
  Product(Tensor x, const Projections& projections, Tensor residual, Output out, int threads)
      : x_(x), residual_(residual), out_(out), offsets_{0, static_cast<int32_t>(x.rows)} {
    const Weight* weights[] = {&projections.weight, &projections.second, &projections.third, &projections.fourth};
    Tensor biases[] = {projections.bias, projections.second_bias, projections.third_bias, projections.fourth_bias};
    threads_ = worth(threads, x.rows * out.columns * x.columns);
    int64_t column = 0;
    for (int i = 0; i < 4; ++i) {
      if (!*weights[i]) continue;
      Packed packed{&format_of(*weights[i], x.dtype), nullptr, x.columns};
      const Format& format = *packed.format;
      Grid grid({offsets_, 2}, weights[i]->N, 1, x.columns, format, format.pack_unit, threads_);
      int64_t first_task = tasks_;
      tasks_ += grid.tasks();
      parts_.push_back({*weights[i], biases[i], packed, grid, column, first_task});
      column += weights[i]->N;
    }
    pack_places();
  }

  void run() {
    std::vector<Phase> phases;
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (shares_with(i) != i) continue;
      Phase pack = pack_phase(x_, x_.rows, parts_[i].packed);
      if (x_.rows * x_.columns > kPackAlone) {
        phases.push_back(std::move(pack));
      } else {
        for (int64_t task = 0; task < pack.tasks; ++task) pack.run(task, -1, 0);
      }
    }
    phases.push_back({tasks_, [this](int64_t task, int64_t next, int) { multiply(task, next); }});
    run_phases(phases, threads_);
  }

 private:
  // The first part that takes rows packed as this one's are.
  size_t shares_with(size_t i) const {
    size_t first = 0;
    while (parts_[first].packed.format->pack != parts_[i].packed.format->pack) ++first;
    return first;
  }

  void pack_places() {
    int64_t bytes = 0;
    for (const Part& part : parts_) bytes += x_.rows * part.packed.pitch();
    char* place = scratch(Slot::activations, bytes);
    for (size_t i = 0; i < parts_.size(); ++i) {
      size_t first = shares_with(i);
      parts_[i].packed.data = first == i ? place : parts_[first].packed.data;
      if (first == i) place += x_.rows * parts_[i].packed.pitch();
    }
  }

  const Part& part_of(int64_t task) const {
    size_t i = parts_.size() - 1;
    while (task < parts_[i].first_task) --i;
    return parts_[i];
  }

  void multiply(int64_t task, int64_t next) const {
    const Kernels& k = kernels();
    const Part& part = part_of(task);
    Workspace ws;
    Cell c = part.grid.cell(task - part.first_task);
    for (int64_t m = 0; m < c.rows; ++m) ws.a[m] = part.packed.row(c.row + m);
    rows_of(part.weight, 0, c.column, c.columns, ws.w);
    const char* ahead = next < 0 ? nullptr : part_of(next).first_row(next);
    part.packed.format->dots({ws.a, ws.w, c.rows, c.columns, x_.columns, ws.z, c.columns, ahead});
    float added[kMaxColumns];
    if (part.bias) {
      k.decode(part.bias.dtype, row_of(part.bias, c.column, 1), added, c.columns);
      for (int64_t m = 0; m < c.rows; ++m) add(added, ws.z + m * c.columns, c.columns);
    }
    int64_t column = part.column + c.column;
    for (int64_t m = 0; m < c.rows; ++m) {
      int64_t at = (c.row + m) * out_.columns + column;
      if (residual_) {
        k.decode(residual_.dtype, row_of(residual_, at, 1), added, c.columns);
        add(added, ws.z + m * c.columns, c.columns);
      }
      k.encode(ws.z + m * c.columns, out_.dtype, row_of(out_, at, 1), c.columns);
    }
  }

  static void add(const float* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] += from[i];
  }

  Tensor x_, residual_;
  Output out_;
  int32_t offsets_[2];  // all rows are of one expert
  int threads_ = 1;
  std::vector<Part> parts_;
  int64_t tasks_ = 0;
};

}  // namespace

void linear(Tensor x, const Projections& projections, Tensor residual, Output out, int threads) {
  Product(x, projections, residual, out, threads).run();
  trim_scratch();
}

}  // namespace moefuse
