// What joins the device with the rest of the engine: rows of logits that the sampler takes reduced,
// selections that drafts take over, pages that leave for another instance. Each test first asks for a GPU,
// and where there is none checks that the backend says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <random>
#include <thread>

#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/cuda_queue.h"
#include "disagg/device_pages_fixture.h"
#include "sampling/reduced_reference.h"
#include "sampling/sampler.h"

namespace sluice::cuda {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<ops::Backend> Device() {
  auto backend = MakeCudaBackend({});
  if (backend.ok()) return *std::move(backend);
  EXPECT_THAT(std::string(Message(backend.status())), HasSubstr("--device c"));
  return nullptr;
}

template <typename T>
std::shared_ptr<std::byte> Array(DeviceMemory& memory, int64_t n, bool shared, T** at) {
  auto owner = shared ? *memory.AllocateShared(n * int64_t(sizeof(T)), "test")
                      : *memory.Allocate(n * int64_t(sizeof(T)), "test");
  *at = reinterpret_cast<T*>(owner.get());
  return owner;
}

TEST(CudaReduceRows, GivesTheBitsOfTheHostAndTheSamplerTheSameTokens) {
  const auto backend = Device();
  if (backend == nullptr) return;
  DeviceMemory& memory = *backend->memory();
  const auto queue = backend->MakeQueue(1, -1);
  int settled = 0, asked = 0;
  for (const int32_t vocab : {154880, 129280, 331, 8, 65, 5000}) {
    const int32_t rows = vocab > 100000 ? 24 : 64;
    std::mt19937 random{uint32_t(vocab)};
    std::normal_distribution<float> noise;
    std::vector<float> logits(size_t(rows) * size_t(vocab));
    for (int32_t r = 0; r < rows; ++r)
      for (int32_t i = 0; i < vocab; ++i) {
        float& x = logits[size_t(r) * size_t(vocab) + size_t(i)];
        x = noise(random) * float(1 + r % 4);
        if (r % 3 == 1) x = float(int(x * 2)) * 0.5f;  // ties
        if (r == 5) x = -0.0f;
        if (r == 6) x = -std::numeric_limits<float>::infinity();
        if (r == 7 && i == vocab / 2) x = std::numeric_limits<float>::quiet_NaN();
        if (r == 8 && i == vocab - 1) x = std::numeric_limits<float>::infinity();
        if (r == 9 && i % 3 == 0) x = -std::numeric_limits<float>::infinity();
        if (r == 10) x = i == vocab - 2 ? 100.0f : -100.0f;
      }
    Sampler host(vocab, 1), device(vocab, 1);
    std::vector<SampleRow> samples;
    std::vector<RowRequest> requests;
    for (int32_t r = 0; r < rows; ++r)
      for (int v = 0; v < 8; ++v) {
        SampleRow& s = samples.emplace_back();
        s.slot = SlotId(0);
        s.row = r;
        s.position = 100 + v;
        s.seed = uint64_t(r) * 1000 + uint64_t(v);
        s.hash_logits = v % 2 == 0;
        const float temperature[] = {0, 1, 0.6f, 1.5f, 1, 1, 1e-4f, 0.9f},
                    top_p[] = {1, 1, 0.9f, 1, 0.95f, 1, 1, 1};
        const float min_p[] = {0, 0, 0, 0, 0, 0.05f, 0, 0};
        const int32_t top_k[] = {-1, -1, -1, 40, 20, -1, -1, -1};
        s.temperature = temperature[v];
        s.top_p = top_p[v];
        s.min_p = min_p[v];
        s.top_k = top_k[v];
        ASSERT_TRUE(device.TakesReduced(s));
        RowRequest& q = requests.emplace_back(device.RequestFor(s));
        q.place = r;
        q.near = v != 3;
      }
    const auto n = int64_t(requests.size());
    float* on_device;
    RowRequest* request;
    ReducedRow* out;
    RowCandidate* list;
    const auto a = Array(memory, int64_t(logits.size()), false, &on_device);
    const auto b = Array(memory, n, true, &request);
    const auto c = Array(memory, n, true, &out);
    const auto d = Array(memory, n * kMostCandidates, true, &list);
    memory.Copy(on_device, logits.data(), int64_t(logits.size()) * 4);
    std::copy(requests.begin(), requests.end(), request);
    ops::ReduceRowsArgs args;
    args.requests = n;
    args.vocab = vocab;
    args.logits = on_device;
    args.request = request;
    args.out = out;
    args.candidates = list;
    backend->ReduceRows(*queue, args);
    queue->Synchronize();
    ASSERT_TRUE(queue->status().ok()) << queue->status();
    std::vector<RowCandidate> expected_list;
    for (int64_t i = 0; i < n; ++i) {
      const RowRequest& q = requests[size_t(i)];
      const float* x = &logits[size_t(q.place) * size_t(vocab)];
      const ReducedRow& got = out[i];
      const ReducedRow want = sluice::testing::Reduce(x, vocab, q, got.threshold, &expected_list);
      const std::string where = fmt::format("vocab {} row {} request {}", vocab, q.place, i % 8);
      ASSERT_EQ(got.unusable, want.unusable) << where;
      if (want.unusable) continue;
      ASSERT_EQ(got.best, want.best) << where;
      ASSERT_EQ(std::bit_cast<int32_t>(got.max), std::bit_cast<int32_t>(want.max)) << where;
      if (q.hash) {
        ASSERT_TRUE(std::ranges::equal(got.hash_lane, want.hash_lane)) << where;
        ASSERT_EQ(std::memcmp(got.hash_tail, want.hash_tail, sizeof got.hash_tail), 0) << where;
      }
      if (q.near) {
        ASSERT_NEAR(got.near_sum, want.near_sum, 2e-3f * want.near_sum) << where;
      }
      if (q.temperature > 0 && !q.filtered) {
        ASSERT_EQ(got.drawn, want.drawn) << where;
        ASSERT_EQ(got.drawn_value, want.drawn_value) << where;
      }
      if (q.temperature > 0 && (!q.filtered || (q.top_k == 0 && q.top_p < 1))) {
        ASSERT_EQ(got.total, want.total) << where;
      }
      if (q.filtered) {
        ASSERT_EQ(got.candidates, want.candidates) << where;
        if (got.candidates <= kMostCandidates) {
          std::vector<RowCandidate> mine(list + i * kMostCandidates,
                                         list + i * kMostCandidates + got.candidates);
          const auto by_token = [](const RowCandidate& l, const RowCandidate& r) {
            return l.token < r.token;
          };
          std::sort(mine.begin(), mine.end(), by_token);
          std::sort(expected_list.begin(), expected_list.end(), by_token);
          for (size_t k = 0; k < mine.size(); ++k) {
            ASSERT_EQ(mine[k].token, expected_list[k].token) << where;
            ASSERT_EQ(mine[k].weight, expected_list[k].weight) << where;
          }
        }
      }
      SampledToken whole, reduced;
      host.Sample(samples[size_t(i)], x, &whole);
      ++asked;
      if (!device.SampleReduced(samples[size_t(i)], got, list + i * kMostCandidates, &reduced)) {
        ASSERT_GT(got.candidates, kMostCandidates) << where;
        continue;
      }
      ++settled;
      ASSERT_EQ(reduced.token, whole.token) << where;
      ASSERT_EQ(reduced.logits_hash, whole.logits_hash) << where;
    }
  }
  std::printf("%d of %d rows needed no whole row\n", settled, asked);
  EXPECT_GT(settled, asked * 8 / 10);
}

TEST(CudaReduceRows, TimesOfABatchOf128RowsOfGlm5) {
  const auto backend = Device();
  if (backend == nullptr) return;
  constexpr int64_t kRows = 128, kVocab = 154880;
  DeviceMemory& memory = *backend->memory();
  const auto queue = backend->MakeQueue(1, -1);
  std::mt19937 random{1};
  std::normal_distribution<float> noise;
  std::vector<float> logits(size_t(kRows * kVocab));
  for (float& x : logits) x = noise(random) * 3;
  float* on_device;
  float* on_host;
  RowRequest* request;
  ReducedRow* out;
  RowCandidate* list;
  const auto a = Array(memory, kRows * kVocab, false, &on_device);
  const auto h = Array(memory, kRows * kVocab, true, &on_host);
  const auto b = Array(memory, kRows, true, &request);
  const auto c = Array(memory, kRows, true, &out);
  const auto d = Array(memory, kRows * kMostCandidates, true, &list);
  memory.Copy(on_device, logits.data(), kRows * kVocab * 4);
  const auto time = [&](const char* name, const std::function<void()>& work) {
    double best = 1e9;
    for (int i = 0; i < 6; ++i) {
      queue->Mark(false);
      work();
      queue->Mark(true);
      best = std::min(best, queue->MarkedSeconds());
    }
    std::printf("%-40s %8.1f us\n", name, best * 1e6);
  };
  const auto reduce = [&](const char* name, const RowRequest& q) {
    for (int64_t i = 0; i < kRows; ++i) {
      request[i] = q;
      request[i].place = int32_t(i);
      request[i].uniform = double(i) / kRows;
    }
    ops::ReduceRowsArgs args;
    args.requests = kRows;
    args.vocab = kVocab;
    args.logits = on_device;
    args.request = request;
    args.out = out;
    args.candidates = list;
    time(name, [&] { backend->ReduceRows(*queue, args); });
  };
  time("128 rows of 154880 to the host", [&] { queue->Download(on_host, on_device, kRows * kVocab * 4); });
  RowRequest q;
  reduce("128 rows, greedy", q);
  q.near = true;
  reduce("128 rows, greedy, share of the draft", q);
  q.near = false;
  q.temperature = 0.8f;
  reduce("128 rows, drawn among all", q);
  q.filtered = true;
  q.top_p = 0.95f;
  reduce("128 rows, top_p 0.95", q);
  q.top_p = 1;
  q.top_k = 50;
  reduce("128 rows, top_k 50", q);
  q = {};
  q.hash = true;
  reduce("128 rows, greedy, hash of the row", q);
  EXPECT_TRUE(queue->status().ok()) << queue->status();
}

TEST(CudaCarrySelection, MovesRowsUpInPlaceLikeTheHost) {
  const auto backend = Device();
  if (backend == nullptr) return;
  DeviceMemory& memory = *backend->memory();
  const auto queue = backend->MakeQueue(1, -1);
  constexpr int64_t kTopk = 96, kBefore = 9, kRows = 5;
  std::vector<int32_t> selected(size_t(kTopk * kBefore)), count(size_t{kBefore});
  for (size_t i = 0; i < selected.size(); ++i) selected[i] = int32_t(i * 13 % 1000);
  for (size_t i = 0; i < count.size(); ++i) count[i] = int32_t(90 + i);
  const std::vector<int32_t> from = {0, 2, 3, 7, 8}, positions = {500, 40, 95, 96, 700};
  std::vector<int32_t> want = selected, want_count = count;
  ops::CarrySelectionArgs host{kRows, kTopk, from.data(), positions.data(), want.data(), want_count.data()};
  backend->ops::Backend::CarrySelection(*queue, host);
  int32_t *f, *p, *s, *n;
  const auto a = Array(memory, kRows, false, &f), b = Array(memory, kRows, false, &p);
  const auto c = Array(memory, kTopk * kBefore, false, &s), d = Array(memory, kBefore, false, &n);
  memory.Copy(f, from.data(), kRows * 4);
  memory.Copy(p, positions.data(), kRows * 4);
  memory.Copy(s, selected.data(), kTopk * kBefore * 4);
  memory.Copy(n, count.data(), kBefore * 4);
  backend->CarrySelection(*queue, {kRows, kTopk, f, p, s, n});
  queue->Synchronize();
  ASSERT_TRUE(queue->status().ok()) << queue->status();
  memory.Copy(selected.data(), s, kTopk * kBefore * 4);
  memory.Copy(count.data(), n, kBefore * 4);
  EXPECT_EQ(selected, want);
  EXPECT_EQ(count, want_count);
}

// Holds a stream until the test lets it go.
struct Hold {
  std::atomic<bool> open{false};
  static void Wait(void* self) {
    while (!static_cast<Hold*>(self)->open) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
};

TEST(CudaTransfer, NoByteOfALayerLeavesBeforeTheStreamHasPassedItsEvent) {
  const auto backend = Device();
  if (backend == nullptr) return;
  DeviceMemory& memory = *backend->memory();
  const auto queue = backend->MakeQueue(1, -1);
  const cudaStream_t stream = static_cast<CudaQueue&>(*queue).stream();
  disagg::testing::DevicePair pair(memory, sluice::testing::MakeLayout(sluice::testing::Small()),
                                   /*layer_group=*/1, 40);
  std::vector<PageId> source, pages;
  for (int32_t i = 0; i < 10; ++i) {
    source.push_back(PageId(2 + i * 7 % 10));
    pages.push_back(PageId(20 + i * 3 % 10));
  }
  pair.Open(1, 640, pages);
  ASSERT_TRUE(pair.Wait(true, disagg::RoomEvent::Kind::kReady, 1));
  // Four pages were cached; nothing else of the prompt is there before its layer's event.
  pair.prefill->BeginForward(1, 1, {256, 640, true, true}, source);
  std::vector<std::shared_ptr<std::byte>> staging;
  int64_t sent = 0;
  for (int l = 0; l < 3; ++l) {
    // What the device will write, where it reads it by itself: nothing may be allocated while it is held.
    std::vector<std::pair<std::byte*, std::shared_ptr<std::byte>>> writes;
    std::vector<int64_t> sizes;
    for (const KvPiece& piece : pair.layout().pieces())
      for (const PageId page : source) {
        if (piece.layer != LogicalLayer(l)) continue;
        staging.push_back(*memory.AllocateShared(piece.bytes, "test"));
        const std::vector<std::byte> bytes = pair.Bytes(page, piece);
        std::copy(bytes.begin(), bytes.end(), staging.back().get());
        writes.emplace_back(pair.from->Piece(piece, page), staging.back());
        sizes.push_back(piece.bytes);
      }
    // The device is held before it has written the layer; the forward's thread has gone on meanwhile.
    Hold hold;
    ASSERT_EQ(cudaLaunchHostFunc(stream, &Hold::Wait, &hold), cudaSuccess);
    for (size_t i = 0; i < writes.size(); ++i)
      queue->Upload(writes[i].first, writes[i].second.get(), sizes[i]);
    pair.prefill->LayerQueued(1, LogicalLayer(l), queue->RecordEvent());
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_EQ(pair.prefill->Stats().bytes_sent, sent);
    for (int later = l; later < 3; ++later) EXPECT_EQ(pair.Arrived(LogicalLayer(later), pages), 0);
    hold.open = true;
    sent += 10 * pair.LayerBytes(LogicalLayer(l));
    EXPECT_TRUE(pair.Sent(sent)) << l;
    queue->Synchronize();
  }
  queue->Synchronize();
  pair.prefill->ForwardDone(1, queue->status());
  pair.prefill->SetAux(1, {});
  ASSERT_TRUE(pair.Wait(false, disagg::RoomEvent::Kind::kReady, 1));
  pair.ExpectHolds(source, pages);
  EXPECT_EQ(pair.decode->Stats().digests_checked, 10);
  EXPECT_EQ(pair.prefill->Stats().bytes_before_forward_end, sent);
}

// Last: a fault spoils the device for the whole process. The rooms end with its text, and the process lives.
TEST(CudaTransferFault, EndsTheRoomWithTheDevicesTextAndNotTheProcess) {
  const auto backend = Device();
  if (backend == nullptr) return;
  DeviceMemory& memory = *backend->memory();
  auto copier = *memory.MakeCopier();
  ASSERT_TRUE(copier->Bind().ok());
  const auto from = *memory.Allocate(4096, "test"), to = *memory.AllocateShared(4096, "test");
  memory.Fill(from.get(), 7, 4096);
  const std::vector<MemoryRun> good = {{from.get(), to.get(), 4096}};
  ASSERT_TRUE(copier->CopyRuns(good).ok());
  EXPECT_EQ(to.get()[4095], std::byte(7));
  disagg::testing::DevicePair pair(memory, sluice::testing::MakeLayout(sluice::testing::Small()), 3, 40);
  pair.Open(1, 256, {PageId(20), PageId(21), PageId(22), PageId(23)});
  ASSERT_TRUE(pair.Wait(true, disagg::RoomEvent::Kind::kReady, 1));
  pair.prefill->BeginForward(1, 1, {0, 256, true, true}, {PageId(2), PageId(3), PageId(4), PageId(5)});
  const std::vector<MemoryRun> bad = {{reinterpret_cast<const std::byte*>(16), to.get(), 4096}};
  const Status fault = copier->CopyRuns(bad);
  ASSERT_FALSE(fault.ok());
  EXPECT_THAT(std::string(Message(fault)), HasSubstr("illegal memory access"));
  for (int l = 0; l < 3; ++l) pair.prefill->LayerFinal(1, LogicalLayer(l));
  pair.prefill->ForwardDone(1, OkStatus());
  pair.prefill->SetAux(1, {});
  const auto failed = pair.Wait(false, disagg::RoomEvent::Kind::kFailed, 1);
  ASSERT_TRUE(failed);
  EXPECT_THAT(std::string(Message(failed->status)), HasSubstr("illegal memory access"));
  ASSERT_TRUE(pair.Wait(true, disagg::RoomEvent::Kind::kEnded, 1));
}

}  // namespace
}  // namespace sluice::cuda
