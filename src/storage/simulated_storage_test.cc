#include "storage/simulated_storage.h"

#include <cstring>
#include <limits>

#include "storage/storage_fixture.h"

namespace sluice {
namespace {

StorageFormat SmallFormat() { return TestFormat({100, 28, 100, 28}); }

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
  TestPage in(SmallFormat(), 7), out(SmallFormat());
  EXPECT_EQ(RunOne(&a, &clock, StorageOp::kGet, out.Item(1)), StorageOutcome::kMiss);
  EXPECT_EQ(RunOne(&a, &clock, StorageOp::kPut, in.Item(1)), StorageOutcome::kOk);
  EXPECT_EQ(RunOne(&a, &clock, StorageOp::kExists, {TestKey(1), {}}), StorageOutcome::kOk);
  SimulatedStorage b(SmallFormat(), &medium, &clock, 2, {});
  EXPECT_EQ(RunOne(&b, &clock, StorageOp::kGet, out.Item(1)), StorageOutcome::kOk);
  EXPECT_EQ(in.pieces, out.pieces);
  StorageFormat other = SmallFormat();
  other.content_fingerprint = TestKey(99);
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
      TestPage in(SmallFormat(), uint64_t(i));
      RunOne(&s, &clock, StorageOp::kPut, in.Item(uint64_t(i)));
    }
    for (int i = 0; i < 50; ++i) {
      TestPage in(SmallFormat(), uint64_t(i)), out(SmallFormat());
      const StorageOutcome o = RunOne(&s, &clock, StorageOp::kGet, out.Item(uint64_t(i)));
      if (o == StorageOutcome::kOk) {
        EXPECT_EQ(in.pieces, out.pieces) << i;
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
  TestPage out(SmallFormat());
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
    TestPage page(SmallFormat(), 3);
    for (int i = 0; i < 200; ++i) {
      const auto op = StorageOp(i % 4);
      log += std::string(Name(RunOne(&s, &clock, op, page.Item(uint64_t(i % 17))))) +
             std::to_string(clock.Now()) + " ";
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
  format.Encode(TestKey(1), 1, a);
  format.Encode(TestKey(2), 1, b);
  EXPECT_EQ(format.CheckHeader(a, TestKey(1), 1), StorageOutcome::kOk);
  EXPECT_EQ(format.CheckHeader(a, TestKey(2), 1), StorageOutcome::kCorrupt);
  EXPECT_EQ(format.CheckHeader(a, TestKey(1), 2), StorageOutcome::kMiss);
  ChecksumStream sa, sb;
  sa.Add(a);
  sb.Add(b);
  EXPECT_NE(sa.Finish(), sb.Finish());
  for (size_t i = 0; i < a.size();
       ++i) {  // every header byte counts, but for generation (a miss) and the checksum itself
    auto broken = a;
    broken[i] ^= std::byte{1};
    if (i >= 112 && i < 128) continue;
    EXPECT_NE(format.CheckHeader(broken, TestKey(1), 1), StorageOutcome::kOk) << i;
  }
}

}  // namespace
}  // namespace sluice
