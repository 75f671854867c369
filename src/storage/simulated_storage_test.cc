#include "storage/simulated_storage.h"

#include <cstring>
#include <limits>

#include "gtest/gtest.h"

namespace sluice {
namespace {

Digest256 Key(int i) {
  Hasher h;
  h.AddU64(uint64_t(i));
  return h.Finish();
}

StorageFormat SmallFormat() {
  StorageFormat f;
  f.content_fingerprint = Key(-1);
  f.piece_bytes = {100, 28, 100, 28};
  return f;
}

struct Page {
  std::vector<std::byte> bytes = std::vector<std::byte>(256);
  explicit Page(int fill) { std::memset(bytes.data(), fill, bytes.size()); }
  StorageItem Item(int key) {
    StorageItem item{Key(key), {}};
    size_t at = 0;
    for (size_t n : {100, 28, 100, 28}) {
      item.spans.emplace_back(bytes.data() + at, n);
      at += n;
    }
    return item;
  }
};

StorageOutcome RunOne(SimulatedStorage* s, VirtualClock* clock, StorageOp op, StorageItem item) {
  StorageBatch b;
  b.op = op;
  b.items.push_back(std::move(item));
  auto t = s->Submit(std::move(b));
  EXPECT_TRUE(t.ok());
  std::vector<StorageCompletion> done;
  EXPECT_EQ(s->Poll(&done, 9), 0u);
  clock->Set(s->NextDue());
  EXPECT_EQ(s->Poll(&done, 9), 1u);
  EXPECT_EQ(done[0].ticket, *t);
  return done[0].outcomes[0];
}

TEST(SimulatedStorage, GivesBackWhatWasPutAlsoThroughAnotherInstance) {
  VirtualClock clock;
  SimulatedMedium medium;
  SimulatedStorage a(SmallFormat(), &medium, &clock, 1, {});
  Page in(7), out(0);
  EXPECT_EQ(RunOne(&a, &clock, StorageOp::kGet, out.Item(1)), StorageOutcome::kMiss);
  EXPECT_EQ(RunOne(&a, &clock, StorageOp::kPut, in.Item(1)), StorageOutcome::kOk);
  EXPECT_EQ(RunOne(&a, &clock, StorageOp::kExists, {Key(1), {}}), StorageOutcome::kOk);
  SimulatedStorage b(SmallFormat(), &medium, &clock, 2, {});
  EXPECT_EQ(RunOne(&b, &clock, StorageOp::kGet, out.Item(1)), StorageOutcome::kOk);
  EXPECT_EQ(in.bytes, out.bytes);
  StorageFormat other = SmallFormat();
  other.content_fingerprint = Key(-2);
  SimulatedStorage c(other, &medium, &clock, 2, {});
  EXPECT_EQ(RunOne(&c, &clock, StorageOp::kGet, out.Item(1)), StorageOutcome::kMiss);
  ASSERT_TRUE(a.Clear().ok());
  EXPECT_EQ(RunOne(&b, &clock, StorageOp::kGet, out.Item(1)), StorageOutcome::kMiss);
}

TEST(SimulatedStorage, DamagedObjectsAreNeverDelivered) {
  for (int kind = 0; kind < 3; ++kind) {
    StorageFaults faults;
    (kind == 0 ? faults.flip : kind == 1 ? faults.truncate : faults.swap) = 1;
    VirtualClock clock;
    SimulatedMedium medium;
    SimulatedStorage s(SmallFormat(), &medium, &clock, uint64_t(kind), faults);
    int bad = 0;
    for (int i = 0; i < 50; ++i) {
      Page in(i);
      RunOne(&s, &clock, StorageOp::kPut, in.Item(i));
    }
    for (int i = 0; i < 50; ++i) {
      Page in(i), out(0);
      const StorageOutcome o = RunOne(&s, &clock, StorageOp::kGet, out.Item(i));
      if (o == StorageOutcome::kOk) {
        EXPECT_EQ(in.bytes, out.bytes) << i;
      } else {
        EXPECT_TRUE(o == StorageOutcome::kCorrupt ||
                    o == StorageOutcome::kMiss);  // a flipped generation is a miss
        ++bad;
      }
    }
    EXPECT_GE(bad, kind == 2 ? 20 : 50) << kind;
  }
}

TEST(SimulatedStorage, HungBatchKeepsItsSpansPastTheDeadline) {
  StorageFaults faults;
  faults.hang = 1;
  VirtualClock clock;
  SimulatedMedium medium;
  SimulatedStorage s(SmallFormat(), &medium, &clock, 1, faults);
  Page out(0);
  StorageBatch b;
  b.items.push_back(out.Item(1));
  b.deadline = 1'000'000;
  auto t = s.Submit(std::move(b));
  ASSERT_TRUE(t.ok());
  clock.Advance(30'000'000'000);
  std::vector<StorageCompletion> done;
  EXPECT_EQ(s.Poll(&done, 1), 0u);
  clock.Advance(30'000'000'000);
  ASSERT_EQ(s.Poll(&done, 1), 1u);
  EXPECT_EQ(done[0].outcomes[0], StorageOutcome::kTimeout);
  EXPECT_EQ(s.NextDue(), std::numeric_limits<Nanos>::max());
}

TEST(SimulatedStorage, SameSeedSameSchedule) {
  auto run = [](uint64_t seed) {
    StorageFaults faults;
    faults.slow = 0.2;
    faults.error = faults.full = faults.lose = faults.flip = faults.vanish = 0.1;
    VirtualClock clock;
    SimulatedMedium medium;
    medium.capacity_objects = 10;
    SimulatedStorage s(SmallFormat(), &medium, &clock, seed, faults);
    std::string log;
    Page page(3);
    for (int i = 0; i < 200; ++i) {
      const auto op = StorageOp(i % 4);
      log += std::string(Name(RunOne(&s, &clock, op, page.Item(i % 17)))) + std::to_string(clock.Now()) + " ";
    }
    return log;
  };
  EXPECT_EQ(run(5), run(5));
  EXPECT_NE(run(5), run(6));
}

TEST(ObjectFormat, ChecksumIsEqualForAnySplitAndBoundToTheHeader) {
  std::vector<std::byte> data(10'000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = std::byte(uint8_t(i * 7));
  ChecksumStream whole;
  whole.Add(data);
  for (size_t cut : {size_t(1), size_t(255), size_t(1024), size_t(9999)}) {
    ChecksumStream parts;
    parts.Add({data.data(), cut});
    parts.Add({data.data() + cut, data.size() - cut});
    EXPECT_EQ(parts.Finish(), whole.Finish());
  }
  ObjectFormat format(SmallFormat(), 64);
  std::vector<std::byte> a(size_t(format.header_bytes())), b(a);
  format.Encode(Key(1), 1, a);
  format.Encode(Key(2), 1, b);
  EXPECT_EQ(format.CheckHeader(a, Key(1), 1), StorageOutcome::kOk);
  EXPECT_EQ(format.CheckHeader(a, Key(2), 1), StorageOutcome::kCorrupt);
  EXPECT_EQ(format.CheckHeader(a, Key(1), 2), StorageOutcome::kMiss);
  ChecksumStream sa, sb;
  sa.Add(a);
  sb.Add(b);
  EXPECT_NE(sa.Finish(), sb.Finish());
  for (size_t i = 0; i < a.size();
       ++i) {  // every header byte counts, but for generation (a miss) and the checksum itself
    auto broken = a;
    broken[i] ^= std::byte{1};
    if (i >= 112 && i < 128) continue;
    EXPECT_NE(format.CheckHeader(broken, Key(1), 1), StorageOutcome::kOk) << i;
  }
}

}  // namespace
}  // namespace sluice
