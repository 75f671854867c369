// What needs a GPU: planned memory, checked steps, hangs and faults, pinned memory and page copies. Built
// with the CUDA backend, run where there is a GPU (tools/cuda/measure.sh); exit code 3 without one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>

#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/cuda_queue.h"
#include "base/end_process.h"
#include "base/random.h"
#include "exec/watchdog.h"
#include "kv/layout_fixture.h"
#include "kv/page_copier.h"
#include "tools/cuda/device_test_kernels.h"

namespace sluice::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::unique_ptr<ops::Backend> Make(CudaOptions options = {}) {
  auto made = MakeCudaBackend(options);
  EXPECT_TRUE(made.ok()) << Message(made.status());
  return std::move(*made);
}

// An array on the device.
template <typename T>
struct OnDevice {
  DeviceMemory* memory;
  std::shared_ptr<std::byte> bytes;
  size_t n;
  OnDevice(ops::Backend& backend, size_t count)
      : memory(backend.memory()),
        bytes(memory->Allocate(int64_t(count * sizeof(T)) + 64, "test").value()),
        n(count) {
    memory->Fill(bytes.get(), 0, int64_t(count * sizeof(T)));
  }
  OnDevice(ops::Backend& backend, const std::vector<T>& values) : OnDevice(backend, values.size()) {
    if (n > 0) memory->Copy(bytes.get(), values.data(), int64_t(n * sizeof(T)));
  }
  T* get() const { return reinterpret_cast<T*>(bytes.get()); }
  std::vector<T> Read() const {
    std::vector<T> v(n);
    if (n > 0) memory->Copy(v.data(), bytes.get(), int64_t(n * sizeof(T)));
    return v;
  }
};

std::vector<float> Noise(size_t n, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> d;
  std::vector<float> v(n);
  for (float& x : v) x = d(rng);
  return v;
}

// Rows of sequences of given lengths at their ends, over a pool of one layer of GLM-5's shape with noise in
// it.
struct PagedRows {
  static constexpr int64_t kHeads = 64, kIndexHeads = 32, kDim = 128, kTopK = 2048;
  std::vector<int32_t> seq_of_row, positions, row_begin, num_rows, page_begin;
  std::vector<PageId> pages;
  int64_t max_context = 0;

  PagedRows(const std::vector<int>& lengths, const std::vector<int>& rows) {
    int32_t next = 1;
    for (size_t s = 0; s < lengths.size(); ++s) {
      page_begin.push_back(int32_t(pages.size()));
      row_begin.push_back(int32_t(positions.size()));
      num_rows.push_back(rows[s]);
      for (int p = 0; p < (lengths[s] + 63) / 64; ++p) pages.push_back(PageId(next++));
      for (int i = 0; i < rows[s]; ++i) {
        seq_of_row.push_back(int32_t(s));
        positions.push_back(lengths[s] - rows[s] + i);
      }
      max_context = std::max<int64_t>(max_context, lengths[s]);
    }
  }
  int64_t rows() const { return int64_t(positions.size()); }
};

struct SparseRun {
  std::vector<int32_t> selected, count;
  std::vector<float> gap;
  std::vector<uint16_t> out;
};

class SparseOps {
 public:
  static constexpr int64_t kPositions = 8192;

  SparseOps(ops::Backend& backend, DType rows, int64_t pool_pages) : backend_(backend) {
    ModelConfig m = sluice::testing::Glm5();
    m.num_layers = 1;
    m.num_draft_layers = 0;
    m.index.computes = {true};
    layout_ = sluice::testing::MakeLayout(m, rows, rows);
    pool_ = DevicePool::Make(layout_, 1, pool_pages, backend.memory()).value();
    const int64_t positions = pool_pages * 64;
    const std::vector<float> norm(512, 1.0f), zero(128, 0.0f);
    std::vector<int32_t> page, offset, position;
    for (int64_t p = 0; p < positions; ++p) {
      page.push_back(int32_t(p / 64));
      offset.push_back(int32_t(p % 64));
      position.push_back(int32_t(p % kPositions));
    }
    std::vector<float> cos(size_t(kPositions) * 32), sin(cos.size());
    for (size_t i = 0; i < cos.size(); ++i) {
      const float angle = float(i / 32) * std::pow(1e4f, -float(i % 32) / 32);
      cos[i] = std::cos(angle);
      sin[i] = std::sin(angle);
    }
    cos_ = std::make_unique<OnDevice<float>>(backend, cos);
    sin_ = std::make_unique<OnDevice<float>>(backend, sin);
    const OnDevice<float> ckv(backend, Noise(size_t(positions) * 704, 1)), n(backend, norm), z(backend, zero);
    const OnDevice<int32_t> pg(backend, page), of(backend, offset), po(backend, position);
    const auto queue = backend.MakeQueue(1, -1);
    ops::WriteLatentArgs w;
    w.rows = positions;
    w.ckv = ckv.get();
    w.ckv_ld = 704;
    w.norm_weight = n.get();
    w.eps = 1e-5f;
    w.positions = po.get();
    w.table = Table();
    w.pool = pool_.get();
    w.layer = LogicalLayer(0);
    w.slots = {reinterpret_cast<const PageId*>(pg.get()), of.get()};
    backend.WriteLatent(*queue, w);
    ops::WriteIndexArgs x;
    x.rows = positions;
    x.dim = 128;
    x.rope = 64;
    x.k = ckv.get() + 576;
    x.k_ld = 704;
    x.norm_weight = n.get();
    x.norm_bias = z.get();
    x.eps = 1e-6f;
    x.positions = po.get();
    x.table = Table();
    x.pool = pool_.get();
    x.layer = LogicalLayer(0);
    x.slots = w.slots;
    backend.WriteIndex(*queue, x);
    queue->Synchronize();
    EXPECT_TRUE(queue->status().ok()) << Message(queue->status());
  }

  // Selection and attention of the batch, row inputs by `first_row` on.
  SparseRun Run(ops::Queue& queue, const PagedRows& b, int64_t first_row = 0) {
    using P = PagedRows;
    const int64_t rows = b.rows();
    const OnDevice<int32_t> seq(backend_, b.seq_of_row), pos(backend_, b.positions),
        rb(backend_, b.row_begin), nr(backend_, b.num_rows), pb(backend_, b.page_begin);
    std::vector<int32_t> ids;
    for (const PageId p : b.pages) ids.push_back(p.value);
    const OnDevice<int32_t> pages(backend_, ids);
    std::vector<float> q, weight;
    std::vector<uint16_t> full;
    for (int64_t r = 0; r < rows; ++r) {
      const auto row = Noise(size_t(P::kIndexHeads * P::kDim), 100 + uint64_t(first_row + r)),
                 w = Noise(size_t(P::kIndexHeads), 5000 + uint64_t(first_row + r)),
                 f = Noise(size_t(P::kHeads * 576), 9000 + uint64_t(first_row + r));
      q.insert(q.end(), row.begin(), row.end());
      weight.insert(weight.end(), w.begin(), w.end());
      for (const float v : f) full.push_back(F32ToBF16(v * 0.3f));
    }
    const OnDevice<float> dq(backend_, q), dw(backend_, weight), gap(backend_, size_t(rows));
    const OnDevice<uint16_t> dfull(backend_, full), out(backend_, size_t(rows * P::kHeads * 512));
    const OnDevice<int32_t> selected(backend_, size_t(rows * P::kTopK)), count(backend_, size_t(rows));
    ops::SeqTables t;
    t.rows = rows;
    t.seqs = int64_t(b.num_rows.size());
    t.seq_of_row = seq.get();
    t.positions = pos.get();
    t.row_begin = rb.get();
    t.num_rows = nr.get();
    t.max_context = b.max_context;
    t.num_pages = int64_t(b.pages.size());
    t.page_begin = pb.get();
    t.pages = reinterpret_cast<const PageId*>(pages.get());
    ops::IndexSelectArgs s;
    s.seqs = t;
    s.heads = P::kIndexHeads;
    s.dim = P::kDim;
    s.rope = 64;
    s.topk = P::kTopK;
    s.q = dq.get();
    s.head_weight = dw.get();
    s.scale = 0.0156f;
    s.table = Table();
    s.pool = pool_.get();
    s.layer = LogicalLayer(0);
    s.selected = selected.get();
    s.selected_count = count.get();
    s.gap = gap.get();
    backend_.IndexSelect(queue, s);
    ops::AttentionArgs a;
    a.seqs = t;
    a.heads = P::kHeads;
    a.kv_lora = 512;
    a.rope = 64;
    a.topk = P::kTopK;
    a.q = dfull.get();
    a.scale = 0.05f;
    a.pool = pool_.get();
    a.layer = LogicalLayer(0);
    a.selected = selected.get();
    a.selected_count = count.get();
    a.out = out.get();
    backend_.Attention(queue, a);
    queue.Synchronize();
    EXPECT_TRUE(queue.status().ok()) << Message(queue.status());
    return {selected.Read(), count.Read(), gap.Read(), out.Read()};
  }

  ops::Limits Limits(int64_t rows, int64_t context) const {
    ops::Limits l;
    l.max_rows = rows;
    l.max_seqs = rows;
    l.max_context = context;
    l.max_pages = rows * (context / 64 + 2);
    l.max_index_heads = PagedRows::kIndexHeads;
    l.index_dim = PagedRows::kDim;
    l.hidden = 6144;
    l.heads = PagedRows::kHeads;
    l.widest_input = 16384;
    l.upload_bytes = 1 << 16;
    return l;
  }
  const DevicePool& pool() const { return *pool_; }

 private:
  ops::RopeTable Table() const { return {cos_->get(), sin_->get(), 32}; }
  ops::Backend& backend_;
  KvLayout layout_;
  std::unique_ptr<DevicePool> pool_;
  std::unique_ptr<OnDevice<float>> cos_, sin_;
};

TEST(ScoreBudget, ChangesNoSelection) {
  const auto backend = Make();
  for (const DType rows : {DType::kF8E4M3, DType::kBF16}) {
    SparseOps sparse(*backend, rows, 200);
    // 300 rows of one prompt and verify rows of others, contexts up to 8000.
    for (const auto& [lengths, each] :
         {std::pair{std::vector<int>{8000}, std::vector<int>{300}},
          std::pair{std::vector<int>{8000, 2300, 100, 700}, std::vector<int>{5, 4, 2, 1}}}) {
      const PagedRows batch(lengths, each);
      SparseRun whole;
      for (const int64_t held : {int64_t(1000), int64_t(1), int64_t(3), int64_t(64), int64_t(299)}) {
        ops::Limits limits = sparse.Limits(300, 8000);
        limits.score_bytes = held * limits.ScoreRowBytes();
        ASSERT_TRUE(backend->Plan(limits).ok());
        const auto queue = backend->MakeQueue(1, -1);
        const SparseRun run = sparse.Run(*queue, batch);
        if (held == 1000) whole = run;
        EXPECT_EQ(run.selected, whole.selected) << held;
        EXPECT_EQ(run.count, whole.count) << held;
        EXPECT_EQ(std::memcmp(run.gap.data(), whole.gap.data(), run.gap.size() * 4), 0) << held;
      }
    }
  }
}

// Verify rows: each row has its own length, and what it gets does not depend on the others.
TEST(VerifyRows, OneTwoFourAndFiveRowsInMixedLengthsGetWhatEachGetsAlone) {
  const auto backend = Make({.deterministic = true});
  for (const DType type : {DType::kF8E4M3, DType::kBF16}) {
    SparseOps sparse(*backend, type, 300);
    const std::vector<int> lengths = {1, 64, 65, 2048, 2052, 4100, 7000, 130},
                           rows = {1, 2, 4, 5, 5, 4, 2, 1};
    const PagedRows all(lengths, rows);
    ASSERT_TRUE(backend->Plan(sparse.Limits(64, 8192)).ok());
    const auto queue = backend->MakeQueue(1, -1);
    const SparseRun together = sparse.Run(*queue, all);
    for (size_t s = 0; s < lengths.size(); ++s) {
      for (int i = 0; i < rows[s]; ++i) {
        const int64_t row = all.row_begin[s] + i;
        PagedRows alone({lengths[s] - rows[s] + i + 1}, {1});
        for (size_t p = 0; p < alone.pages.size(); ++p)
          alone.pages[p] = all.pages[size_t(all.page_begin[s]) + p];
        const SparseRun one = sparse.Run(*queue, alone, row);
        EXPECT_EQ(one.count[0], together.count[size_t(row)]) << "row " << row;
        EXPECT_EQ(std::memcmp(one.selected.data(), &together.selected[size_t(row * PagedRows::kTopK)],
                              size_t(PagedRows::kTopK) * 4),
                  0)
            << "row " << row;
        EXPECT_EQ(std::memcmp(one.out.data(), &together.out[size_t(row * PagedRows::kHeads * 512)],
                              size_t(PagedRows::kHeads * 512) * 2),
                  0)
            << "row " << row;
      }
    }
  }
}

TEST(Ops, TakeNoRowsAtAll) {
  const auto backend = Make();
  const SparseOps sparse(*backend, DType::kF8E4M3, 4);
  const auto queue = backend->MakeQueue(1, -1);
  const OnDevice<uint16_t> weights(*backend, size_t(256) * 256);
  const std::vector<uint16_t> host(size_t(256) * 256, 0);
  const ops::WeightView view{DType::kBF16, 256, 256, host.data(), nullptr, 0, 0};
  const auto linear = backend->Pack({&view, 1}).value();
  const std::vector<std::vector<ops::WeightView>> groups(4, {view});
  const auto experts = backend->PackGroups(groups).value();
  const OnDevice<float> room(*backend, size_t(1) << 16);
  const OnDevice<int32_t> ids(*backend, size_t(1) << 12);
  backend->Embed(
      *queue, {.rows = 0, .hidden = 256, .vocab = 256, .table = view, .tokens = ids.get(), .x = room.get()});
  backend->Apply(*queue, {.weight = linear.get(), .rows = 0, .x = room.get(), .y = room.get()});
  backend->ApplyHeads(*queue, {.weight = experts.get(), .rows = 0, .x = room.get(), .y = room.get()});
  backend->RmsNorm(*queue,
                   {.rows = 0, .dim = 256, .x = room.get(), .weight = room.get(), .y_act = room.get()});
  backend->SplitQuery(*queue, {.rows = 0, .heads = 4, .nope = 64, .rope = 64, .kv_lora = 512});
  backend->WriteLatent(*queue, {.rows = 0, .pool = &sparse.pool(), .layer = LogicalLayer(0)});
  backend->WriteIndex(*queue,
                      {.rows = 0, .dim = 128, .rope = 64, .pool = &sparse.pool(), .layer = LogicalLayer(0)});
  ops::IndexSelectArgs select{
      .heads = 32, .dim = 128, .rope = 64, .topk = 2048, .pool = &sparse.pool(), .layer = LogicalLayer(0)};
  backend->IndexSelect(*queue, select);
  select.q = room.get();
  select.seqs.max_context = 4096;
  backend->IndexSelect(*queue, select);
  backend->Attention(*queue, {.heads = 64,
                              .kv_lora = 512,
                              .rope = 64,
                              .topk = 2048,
                              .pool = &sparse.pool(),
                              .layer = LogicalLayer(0)});
  backend->Gate(*queue,
                {.rows = 0, .hidden = 256, .experts = 4, .topk = 2, .x = room.get(), .weight = room.get()});
  backend->Moe(*queue, {.rows = 0, .topk = 2, .gate_up = experts.get(), .down = experts.get()});
  backend->SiluMul(*queue, {.rows = 0, .dim = 128});
  backend->GatherRows(*queue, room.get(), ids.get(), 0, 1024, room.get());
  backend->FiniteRows(*queue, room.get(), 0, 256, ids.get());
  queue->Synchronize();
  EXPECT_TRUE(queue->status().ok()) << Message(queue->status());
}

TEST(CheckedSteps, OneWaitIsAllowedAndAnythingElseIsNamed) {
  const auto backend = Make({.check_steps = true});
  SparseOps sparse(*backend, DType::kF8E4M3, 40);
  ASSERT_TRUE(backend->Plan(sparse.Limits(16, 2560)).ok());
  const auto queue = backend->MakeQueue(1, -1);
  const OnDevice<float> x(*backend, size_t(16) * 6144), y(*backend, size_t(16) * 6144),
      w(*backend, size_t(6144));
  const std::vector<int32_t> sent(1000, 7);
  const OnDevice<int32_t> table(*backend, sent.size());
  const auto step = [&](auto extra) {
    queue->BeginStep();
    queue->Upload(table.get(), sent.data(), int64_t(sent.size()) * 4);
    backend->RmsNorm(
        *queue, {.rows = 16, .dim = 6144, .x = x.get(), .weight = w.get(), .eps = 1e-5f, .y_f32 = y.get()});
    extra();
    queue->Synchronize();
    return std::string(Message(queue->EndStep(1)));
  };
  EXPECT_EQ(step([&] { (void)backend->memory()->free_bytes(); }), "");  // not yet warm
  queue->WarmedUp();
  EXPECT_EQ(step([] {}), "");
  EXPECT_EQ(step([&] {
              for (int i = 0; i < 15; ++i) queue->Upload(table.get(), sent.data(), 4000);
            }),
            "");
  EXPECT_THAT(step([&] { queue->Synchronize(); }), HasSubstr("cudaStreamSynchronize"));
  EXPECT_THAT(step([&] { (void)backend->memory()->free_bytes(); }), HasSubstr("cudaMemGetInfo"));
  EXPECT_THAT(step([&] { (void)backend->memory()->Allocate(1 << 20, "test"); }), HasSubstr("cuda"));
  EXPECT_THAT(step([&] {
                cudaPointerAttributes a{};
                (void)cudaPointerGetAttributes(&a, x.get());
              }),
              HasSubstr("cudaPointerGetAttributes"));
  // Whose an address is, is known without asking.
  EXPECT_EQ(step([&] {
              EXPECT_TRUE(backend->memory()->Holds(x.get()));
              EXPECT_TRUE(backend->memory()->Holds(x.get() + x.n - 1));
              EXPECT_FALSE(backend->memory()->Holds(sent.data()));
            }),
            "");
  EXPECT_THAT(step([&] { backend->memory()->Copy(y.get(), x.get(), 4); }), HasSubstr("2 times"));
  EXPECT_THAT(step([&] {  // scratch beyond the plan
                auto& q = static_cast<CudaQueue&>(*queue);
                q.Scratch<std::byte>(CudaQueue::kIndexQuery, q.Planned(CudaQueue::kIndexQuery) + 1);
              }),
              HasSubstr("not planned"));
  EXPECT_EQ(step([] {}), "");
  EXPECT_EQ(table.Read(), sent);
}

// The device passes marks; what it has not passed is named, in recorded steps too.
TEST(Where, NamesTheOpThatDoesNotEnd) {
  const auto backend = Make({.graph_rows = 64, .check_steps = true});
  const auto made = backend->MakeQueue(1, -1);
  auto& queue = static_cast<CudaQueue&>(*made);
  const auto go_memory = backend->memory()->AllocateShared(64, "test").value();
  auto* go = reinterpret_cast<volatile uint32_t*>(go_memory.get());
  const OnDevice<float> x(*backend, size_t(16) * 6144), w(*backend, size_t(6144)),
      y(*backend, size_t(16) * 6144);
  const auto norm = [&] {
    backend->RmsNorm(
        queue, {.rows = 16, .dim = 6144, .x = x.get(), .weight = w.get(), .eps = 1e-5f, .y_f32 = y.get()});
  };
  const auto body = [&] {
    for (int i = 0; i < 5; ++i) norm();
    LaunchSpin(queue.stream(), const_cast<const uint32_t*>(go));
    queue.Launched("spin");
    norm();
  };
  const auto settles_at = [&](const std::string& text) {
    std::string where;
    for (int i = 0; i < 2000; ++i) {
      where = queue.Where();
      if (where.find(text) != std::string::npos) return where;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return where;
  };
  const ops::ReplayKey key = {1, 2, 3};
  for (int time = 0; time < 3; ++time) {  // plain, recorded, replayed
    SCOPED_TRACE(time);
    *go = 0;
    if (!queue.Replay(key)) {
      const bool recording = queue.Record(key, 16);
      EXPECT_EQ(recording, time == 1);
      body();
      if (recording) queue.EndRecord();
    } else {
      EXPECT_EQ(time, 2);
    }
    EXPECT_THAT(settles_at("spin"), AllOf(HasSubstr("5 of 7 ops have ended"), HasSubstr("running: spin")));
    *go = 1;
    queue.Synchronize();
    EXPECT_EQ(queue.Where(), "");
    EXPECT_TRUE(queue.status().ok()) << Message(queue.status());
  }
}

TEST(DeviceDeathTest, AHangEndsTheProcessAndIsNamed) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        const auto backend = Make({.check_steps = true});
        const auto made = backend->MakeQueue(1, -1);
        auto& queue = static_cast<CudaQueue&>(*made);
        const auto go = backend->memory()->AllocateShared(64, "test").value();
        std::memset(go.get(), 0, 64);
        Watchdog dog(0.5, [&] { return queue.Where(); });
        dog.StepBegins(12, 16);
        LaunchSpin(queue.stream(), reinterpret_cast<const uint32_t*>(go.get()));
        queue.Launched("sparse attention of the test");
        queue.Synchronize();
      },
      ::testing::ExitedWithCode(kEndedByEnvironment),
      "step 12 of 16 rows has not ended.*running: sparse attention of the test");
}

TEST(DeviceDeathTest, AFaultBecomesAStatusAndACopyAfterItEndsTheProcess) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        const auto backend = Make();
        const auto made = backend->MakeQueue(1, -1);
        auto& queue = static_cast<CudaQueue&>(*made);
        LaunchWildWrite(queue.stream());
        queue.Launched("wild write");
        queue.Synchronize();
        std::fprintf(stderr, "status: %s\n", std::string(Message(queue.status())).c_str());
        int32_t word = 0;
        backend->memory()->Copy(&word, &word, 4);
      },
      ::testing::ExitedWithCode(kEndedByEnvironment), "status: .*illegal memory access");
}

// A copy may meet the fault before the queue's own thread does.
TEST(DeviceDeathTest, ACopyThatMeetsAFaultFirstSaysWhatTheQueueWasAt) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        const auto backend = Make();
        const auto made = backend->MakeQueue(1, -1);
        auto& queue = static_cast<CudaQueue&>(*made);
        LaunchWildWrite(queue.stream());
        queue.Launched("wild write");
        cudaDeviceSynchronize();
        int32_t word = 0;
        backend->memory()->Copy(&word, &word, 4);
      },
      ::testing::ExitedWithCode(kEndedByEnvironment), "illegal memory access.*it was at: .*wild write");
}

TEST(PinnedMemory, AHundredPoolsOfOtherSizesAndLayoutsLeaveNoRegistration) {
  const auto backend = Make();
  DeviceMemory& memory = *backend->memory();
  ModelConfig m = sluice::testing::Glm5();
  m.num_layers = 2;
  m.num_draft_layers = 0;
  m.index.computes = {true, true};
  const KvLayout layout = sluice::testing::MakeLayout(m, DType::kF8E4M3, DType::kF8E4M3);
  constexpr HostLayout kLayouts[] = {HostLayout::kLayerFirst, HostLayout::kPageFirst,
                                     HostLayout::kPageFirstDirect, HostLayout::kLayerPageFirst};
  std::unique_ptr<HostPool> kept;
  for (int i = 0; i < 100; ++i) {
    auto pool = HostPool::Make(layout, kLayouts[i % 4], 1 + i % 3, 1 + (i * 7) % 40, &memory);
    ASSERT_TRUE(pool.ok()) << i << ": " << Message(pool.status());
    EXPECT_EQ(memory.pinned_ranges(), kept != nullptr ? 2 : 1);
    const std::byte* base = (*pool)->memory().data();
    cudaPointerAttributes a{};
    ASSERT_EQ(cudaPointerGetAttributes(&a, base), cudaSuccess);
    EXPECT_EQ(a.type, cudaMemoryTypeHost);
    kept = i % 3 == 0 ? std::move(*pool) : nullptr;
    pool = nullptr;
    if (kept == nullptr) {
      ASSERT_EQ(cudaPointerGetAttributes(&a, base), cudaSuccess);
      EXPECT_EQ(a.type, cudaMemoryTypeUnregistered) << "a registration of " << i << " was left behind";
    }
  }
  kept.reset();
  EXPECT_EQ(memory.pinned_ranges(), 0);
}

std::vector<std::byte> PageBytes(const DevicePool& pool, PageId page) {
  std::vector<std::byte> bytes, piece_bytes;
  for (const KvPiece& piece : pool.layout().pieces()) {
    piece_bytes.resize(size_t(piece.bytes));
    pool.memory()->Copy(piece_bytes.data(), pool.Piece(piece, page), piece.bytes);
    bytes.insert(bytes.end(), piece_bytes.begin(), piece_bytes.end());
  }
  return bytes;
}

void FillPage(const DevicePool& pool, PageId page, uint64_t seed) {
  SeededStream random(seed);
  std::vector<std::byte> bytes;
  for (const KvPiece& piece : pool.layout().pieces()) {
    bytes.resize(size_t(piece.bytes));
    for (std::byte& b : bytes) b = std::byte(random.Next());
    pool.memory()->Copy(pool.Piece(piece, page), bytes.data(), piece.bytes);
  }
}

TEST(PageCopies, ComeBackByEveryLegalPairInOneProcess) {
  const auto backend = Make();
  DeviceMemory& memory = *backend->memory();
  ModelConfig glm = sluice::testing::Glm5();
  glm.num_layers = 3;
  glm.num_draft_layers = 0;
  glm.index.computes = {true, false, true};
  int pairs = 0;
  for (const bool small : {false, true}) {
    for (const DType type : {DType::kF8E4M3, DType::kBF16}) {
      const KvLayout layout = sluice::testing::MakeLayout(small ? sluice::testing::Small() : glm, type, type);
      for (const HostLayout order : {HostLayout::kLayerFirst, HostLayout::kPageFirst,
                                     HostLayout::kPageFirstDirect, HostLayout::kLayerPageFirst}) {
        for (const IoBackend io : {IoBackend::kDirect, IoBackend::kKernel}) {
          for (const int32_t lanes : {1, 2}) {
            const auto device = DevicePool::Make(layout, lanes, 9, &memory).value();
            const auto host = HostPool::Make(layout, order, lanes, 7, &memory).value();
            auto copier = PlanCopier::Make(io, *device, *host);
            if (!copier.ok()) continue;
            ++pairs;
            SCOPED_TRACE(fmt::format("{} {} lanes {}", Name(order),
                                     io == IoBackend::kDirect ? "direct" : "kernel", lanes));
            CopyPlan down{1, CopyDirection::kDeviceToHost, {}}, up{2, CopyDirection::kHostToDevice, {}};
            for (int32_t local = 1; local <= 4; ++local) {
              for (int32_t lane = 0; lane < lanes; ++lane) {
                const PageId from(local * lanes + lane), to((local + 4) * lanes + lane);
                const HostPageId at((7 - local) * lanes + lane);
                FillPage(*device, from, uint64_t(from.value) + 1);
                down.pages.push_back({from, at});
                up.pages.push_back({to, at});
              }
            }
            (*copier)->Begin({&down, 1});
            EXPECT_EQ((*copier)->All().bytes, int64_t(down.pages.size()) * layout.page_bytes());
            (*copier)->Begin({&up, 1});
            for (const LogicalLayer layer : layout.layers()) (*copier)->Layer(layer);
            for (size_t i = 0; i < up.pages.size(); ++i)
              EXPECT_EQ(PageBytes(*device, up.pages[i].device), PageBytes(*device, down.pages[i].device));
          }
        }
      }
    }
  }
  EXPECT_EQ(pairs, 2 * 2 * 5 * 2);
  EXPECT_EQ(memory.pinned_ranges(), 0);
}

// Both copy backends over whole pages of GLM-5 as a plan has them, index lists included. No time is asserted.
TEST(PageCopies, TimesOfBothBackends) {
  const auto backend = Make();
  DeviceMemory& memory = *backend->memory();
  ModelConfig glm = sluice::testing::Glm5();
  glm.num_layers = 12;
  glm.num_draft_layers = 0;
  glm.index.computes.assign(12, false);
  for (size_t i = 0; i < 12; i += 4) glm.index.computes[i] = true;
  const KvLayout layout = sluice::testing::MakeLayout(glm, DType::kF8E4M3, DType::kF8E4M3);
  constexpr int32_t kPages = 400;
  const auto device = DevicePool::Make(layout, 1, kPages + 1, &memory).value();
  for (const HostLayout order : {HostLayout::kLayerFirst, HostLayout::kPageFirst,
                                 HostLayout::kPageFirstDirect, HostLayout::kLayerPageFirst}) {
    const auto host = HostPool::Make(layout, order, 1, kPages, &memory).value();
    for (const IoBackend io : {IoBackend::kDirect, IoBackend::kKernel}) {
      auto copier = PlanCopier::Make(io, *device, *host);
      if (!copier.ok()) continue;
      for (const auto& [way, direction] : {std::pair("load", CopyDirection::kHostToDevice),
                                           std::pair("backup", CopyDirection::kDeviceToHost)}) {
        for (const bool layers : {false, true}) {
          CopyPlan plan{1, direction, {}};
          for (int32_t i = 0; i < kPages; ++i)  // no two neighbours
            plan.pages.push_back({PageId(1 + i * 7 % kPages), HostPageId(i * 31 % kPages)});
          std::vector<double> seconds;
          for (int round = 0; round < 7; ++round) {
            const auto begin = std::chrono::steady_clock::now();
            (*copier)->Begin({&plan, 1});
            if (layers) {
              for (const LogicalLayer layer : layout.layers()) (*copier)->Layer(layer);
            } else {
              (*copier)->All();
            }
            seconds.push_back(
                std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
          }
          std::sort(seconds.begin(), seconds.end());
          std::printf("%-18s %-6s %-6s %-15s %6.1f GB/s\n", std::string(Name(order)).c_str(),
                      io == IoBackend::kDirect ? "direct" : "kernel", way,
                      layers ? "layer by layer" : "all at once",
                      double(kPages) * double(layout.page_bytes()) / seconds[3] * 1e-9);
        }
      }
    }
  }
}

TEST(DirectCopier, RefusesAListThatLiesOnTheDevice) {
  const auto backend = Make();
  const KvLayout layout = sluice::testing::MakeLayout(sluice::testing::Small());
  const auto device = DevicePool::Make(layout, 1, 9, backend->memory()).value();
  const auto host = HostPool::Make(layout, HostLayout::kLayerFirst, 1, 9, backend->memory()).value();
  const OnDevice<int64_t> list(*backend, std::vector<int64_t>{1, 2});
  const std::vector<int64_t> pages = {1, 2};
  const auto direct = DirectCopier::Make(*device, *host).value();
  EXPECT_THAT(
      std::string(Message(direct.Copy(CopyDirection::kDeviceToHost, {list.get(), 2}, pages).status())),
      HasSubstr("lies in device memory"));
  EXPECT_TRUE(direct.Copy(CopyDirection::kDeviceToHost, pages, pages).ok());
  const auto kernel = KernelCopier::Make(*device, *host).value();
  const std::vector<int32_t> index = {1, 2};
  EXPECT_FALSE(kernel.Copy(CopyDirection::kDeviceToHost, 0, index.data(), index.data(), 2).ok());
}

class NeedsAGpu : public ::testing::Environment {
 public:
  void SetUp() override {
    const auto backend = MakeCudaBackend({});
    if (backend.ok()) return;
    std::fprintf(stderr, "device_test: %s\n", std::string(Message(backend.status())).c_str());
    std::exit(kEndedByEnvironment);
  }
};
const auto* const environment = ::testing::AddGlobalTestEnvironment(new NeedsAGpu);

}  // namespace
}  // namespace sluice::cuda
