#include "storage/file_storage.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/random.h"
#include "storage/storage_fixture.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using enum StorageOutcome;

class FileStorageTest : public testing::TestWithParam<FileEngine> {
 protected:
  std::unique_ptr<FileStorage> Open(FileStorageOptions o = {}, StorageFormat format = TestFormat()) {
    o.directory = dir_.path() + "/kv";
    o.engine = GetParam();
    o.faults = o.faults != nullptr ? o.faults : faults_;
    auto s = FileStorage::Open(std::move(format), o);
    if (!s.ok()) {
      ADD_FAILURE() << s.status();
      return nullptr;
    }
    return *std::move(s);
  }
  std::string PathOf(uint64_t key) const {
    const std::string want = Hex(TestKey(key));
    for (const auto& e : fs::recursive_directory_iterator(dir_.path()))
      if (e.path().filename() == want) return e.path();
    return "";
  }
  int64_t FilesUnder(const std::string& sub) const {
    int64_t n = 0;
    for (const auto& e : fs::recursive_directory_iterator(dir_.path() + "/kv/" + sub))
      n += e.is_regular_file();
    return n;
  }
  TempDirectory dir_;
  FileFaults* faults_ = nullptr;
};

INSTANTIATE_TEST_SUITE_P(Engines, FileStorageTest, testing::Values(FileEngine::kUring, FileEngine::kThreads),
                         [](const auto& p) { return p.param == FileEngine::kUring ? "uring" : "threads"; });

TEST_P(FileStorageTest, KeepsObjectsOverARestart) {
  {
    auto s = Open();
    EXPECT_EQ(GetPage(s.get(), 1), kMiss);
    EXPECT_EQ(PutPage(s.get(), 1), kOk);
    EXPECT_EQ(PutPage(s.get(), 1), kOk);
    EXPECT_EQ(GetPage(s.get(), 1), kOk);
    const StorageStats st = s->Stats();
    EXPECT_EQ(st.puts, 1);
    EXPECT_EQ(st.puts_present, 1);
    EXPECT_EQ(st.put_bytes, TestFormat().object_bytes());
    EXPECT_EQ(st.objects, 1);
  }
  auto s = Open();
  EXPECT_NE(s->Describe().find("1 objects"), std::string::npos) << s->Describe();
  EXPECT_EQ(RunBatch(s.get(), StorageOp::kExists, {{TestKey(1), {}}, {TestKey(2), {}}}),
            (std::vector<StorageOutcome>{kOk, kMiss}));
  EXPECT_EQ(GetPage(s.get(), 1), kOk);
  EXPECT_EQ(RunBatch(s.get(), StorageOp::kDelete, {{TestKey(1), {}}}), (std::vector<StorageOutcome>{kOk}));
  EXPECT_EQ(GetPage(s.get(), 1), kMiss);
  EXPECT_EQ(s->Stats().bytes, 0);
}

TEST_P(FileStorageTest, BatchesOfManyObjectsCompleteWhole) {
  for (bool direct : {false, true}) {
    FileStorageOptions o;
    o.direct_io = direct;
    auto s = Open(o);
    const uint64_t first = direct ? 1000 : 0;
    std::vector<TestPage> in, out;
    std::vector<StorageItem> puts, gets;
    for (uint64_t i = 0; i < 40; ++i) {
      in.emplace_back(s->format(), i);
      out.emplace_back(s->format());
    }
    for (uint64_t i = 0; i < 40; ++i) {
      puts.push_back(in[i].Item(first + i));
      gets.push_back(out[i].Item(first + i));
    }
    EXPECT_EQ(RunBatch(s.get(), StorageOp::kPut, puts), std::vector<StorageOutcome>(40, kOk));
    EXPECT_EQ(RunBatch(s.get(), StorageOp::kGet, gets), std::vector<StorageOutcome>(40, kOk));
    for (size_t i = 0; i < 40; ++i) EXPECT_TRUE(in[i].pieces == out[i].pieces) << i;
  }
}

TEST_P(FileStorageTest, ReaderMaySplitThePageInOtherSpansThanTheWriter) {
  auto s = Open();
  EXPECT_EQ(PutPage(s.get(), 1), kOk);
  TestPage want(s->format(), 1);
  std::vector<std::byte> flat(size_t(s->format().object_bytes()));
  StorageItem item{TestKey(1), {}};
  for (size_t at = 0;
       at < flat.size();) {  // more spans than one system call takes, not all adjacent in order
    const size_t n = std::min<size_t>(at % 3 == 0 ? 333 : 512, flat.size() - at);
    item.spans.emplace_back(flat.data() + at, n);
    at += n;
  }
  std::vector<std::byte> scattered(flat.size() + item.spans.size() * 8);
  size_t to = 0;
  for (auto& sp : item.spans) {
    sp = {scattered.data() + to, sp.size()};
    to += sp.size() + 8;
  }
  EXPECT_EQ(RunBatch(s.get(), StorageOp::kGet, {item})[0], kOk);
  size_t at = 0;
  for (const auto& sp : item.spans) {
    std::memcpy(flat.data() + at, sp.data(), sp.size());
    at += sp.size();
  }
  at = 0;
  for (const auto& p : want.pieces) {
    EXPECT_EQ(std::memcmp(flat.data() + at, p.data(), p.size()), 0);
    at += p.size();
  }
}

TEST_P(FileStorageTest, AnotherFingerprintOrPieceTableIsAnotherObject) {
  auto s = Open();
  EXPECT_EQ(PutPage(s.get(), 1), kOk);
  StorageFormat other = TestFormat();
  other.content_fingerprint = TestKey(77);
  auto t = Open({}, other);
  EXPECT_EQ(GetPage(t.get(), 1), kMiss);
  auto u = Open(
      {}, TestFormat({700'001, 41'984, 8'448, 41'984, 1}));  // same bytes in all, same fingerprint: a lie
  EXPECT_EQ(GetPage(u.get(), 1), kCorrupt);
}

TEST_P(FileStorageTest, DamagedFilesAreMissesAndCanBeWrittenAnew) {
  struct Case {
    const char* name;
    std::function<void(const std::string&)> damage;
    StorageOutcome want;
  };
  auto resize = [](int64_t delta, bool absolute) {
    return [=](const std::string& p) {
      fs::resize_file(p, absolute ? uintmax_t(delta) : uintmax_t(int64_t(fs::file_size(p)) + delta));
    };
  };
  auto flip = [](int64_t at) {
    return [=](const std::string& p) {
      std::fstream f(p, std::ios::in | std::ios::out | std::ios::binary);
      f.seekg(at);
      const char c = char(f.get() ^ 0x10);
      f.seekp(at);
      f.put(c);
    };
  };
  const std::vector<Case> cases = {
      {"truncated to nothing", resize(0, true), kCorrupt},
      {"one byte left", resize(1, true), kCorrupt},
      {"last byte gone", resize(-1, false), kCorrupt},
      {"a byte more", resize(1, false), kCorrupt},
      {"header bit", flip(33), kCorrupt},
      {"piece table bit", flip(130), kCorrupt},
      {"checksum bit", flip(115), kCorrupt},
      {"first payload byte", flip(4096), kCorrupt},
      {"a byte in the middle", flip(500'000), kCorrupt},
      {"last payload byte", flip(4096 + TestFormat().object_bytes() - 1), kCorrupt},
      {"generation bit", flip(97), kMiss},
      {"deleted", [](const std::string& p) { fs::remove(p); }, kMiss},
      {"a directory",
       [](const std::string& p) {
         fs::remove(p);
         fs::create_directory(p);
       },
       kCorrupt},
      {"a symbolic link",
       [](const std::string& p) {
         fs::rename(p, p + "x");
         fs::create_symlink(p + "x", p);
       },
       kCorrupt},
  };
  auto s = Open();
  uint64_t key = 0;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    ++key;
    EXPECT_EQ(PutPage(s.get(), key), kOk);
    EXPECT_EQ(GetPage(s.get(), key), kOk);
    c.damage(PathOf(key));
    EXPECT_EQ(GetPage(s.get(), key), c.want);
    EXPECT_EQ(PutPage(s.get(), key), kOk);
    EXPECT_EQ(GetPage(s.get(), key), kOk);
  }
  EXPECT_EQ(s->Stats().corrupt, 12);
  EXPECT_EQ(PutPage(s.get(), 100), kOk);
  EXPECT_EQ(PutPage(s.get(), 101), kOk);
  const std::string a = PathOf(100), b = PathOf(101);
  fs::rename(a, a + "x");
  fs::rename(b, a);
  fs::rename(a + "x", b);  // contents swapped: whole, intact, and not the objects that were asked for
  EXPECT_EQ(GetPage(s.get(), 100), kCorrupt);
  EXPECT_EQ(GetPage(s.get(), 101), kCorrupt);
  EXPECT_EQ(PutPage(s.get(), 100), kOk);
  EXPECT_EQ(GetPage(s.get(), 100), kOk);
}

TEST_P(FileStorageTest, ObjectDeletedBetweenExistsAndGetIsAMiss) {
  auto s = Open();
  EXPECT_EQ(PutPage(s.get(), 1), kOk);
  EXPECT_EQ(RunBatch(s.get(), StorageOp::kExists, {{TestKey(1), {}}})[0], kOk);
  fs::remove(PathOf(1));
  EXPECT_EQ(GetPage(s.get(), 1), kMiss);
}

// Answers one kind of call with an errno while armed.
class OneFault final : public FileFaults {
 public:
  int Before(FileCall call, const std::string&) override { return armed && call == which ? error : 0; }
  std::atomic<bool> armed{false};
  FileCall which{};
  int error = 0;
};

TEST_P(FileStorageTest, FailingCallsAreMissesAndServingGoesOn) {
  OneFault fault;
  faults_ = &fault;
  auto s = Open();
  uint64_t key = 0;
  for (auto [call, error] : {std::pair(FileCall::kOpenRead, EACCES),
                             {FileCall::kOpenRead, EMFILE},
                             {FileCall::kStat, EIO},
                             {FileCall::kRead, EIO}}) {
    EXPECT_EQ(PutPage(s.get(), ++key), kOk);
    fault.which = call;
    fault.error = error;
    fault.armed = true;
    EXPECT_EQ(GetPage(s.get(), key), kError);
    fault.armed = false;
    EXPECT_EQ(GetPage(s.get(), key), kOk);  // an error of the medium is no proof of damage: the object stays
  }
  for (auto [call, error] :
       {std::pair(FileCall::kOpenWrite, EIO), {FileCall::kWrite, EIO}, {FileCall::kRename, EIO}}) {
    fault.which = call;
    fault.error = error;
    fault.armed = true;
    EXPECT_EQ(PutPage(s.get(), ++key), kError);
    fault.armed = false;
    EXPECT_EQ(GetPage(s.get(), key), kMiss);
    EXPECT_EQ(PutPage(s.get(), key), kOk);
  }
  EXPECT_EQ(s->Stats().errors, 7);
  EXPECT_EQ(FilesUnder("tmp"), 1);  // the owner file; no temp is left
}

TEST_P(FileStorageTest, FullDiskStopsWritingForAWhileAndNeverServing) {
  OneFault fault;
  faults_ = &fault;
  FileStorageOptions o;
  o.full_pause = 200'000'000;
  auto s = Open(o);
  EXPECT_EQ(PutPage(s.get(), 1), kOk);
  const int64_t bytes = s->Stats().bytes;
  fault.which = FileCall::kWrite;
  fault.error = ENOSPC;
  fault.armed = true;
  EXPECT_EQ(PutPage(s.get(), 2), kFull);
  fault.armed = false;
  EXPECT_TRUE(s->Stats().writes_suspended);
  EXPECT_EQ(PutPage(s.get(), 3), kFull);
  EXPECT_EQ(GetPage(s.get(), 1), kOk);
  EXPECT_EQ(s->Stats().bytes, bytes);
  EXPECT_EQ(FilesUnder("tmp"), 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(250));
  EXPECT_EQ(PutPage(s.get(), 3), kOk);
}

// Reads hang: in the kernel on an empty pipe (io_uring), or in the call itself (threads).
class HangingReads final : public FileFaults {
 public:
  explicit HangingReads(bool uring) : uring_(uring) { EXPECT_EQ(::pipe(pipe_), 0); }
  ~HangingReads() override {
    ::close(pipe_[0]);
    ::close(pipe_[1]);
  }
  int Before(FileCall call, const std::string&) override {
    while (!uring_ && call == FileCall::kRead && armed)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return 0;
  }
  int ReadFd() override { return uring_ && armed ? pipe_[0] : -1; }
  std::atomic<bool> armed{false};

 private:
  bool uring_;
  int pipe_[2];
};

TEST_P(FileStorageTest, HungReadEndsAtItsDeadlineAndLeavesTheBuffersAlone) {
  const bool uring = GetParam() == FileEngine::kUring;
  HangingReads hang(uring);
  faults_ = &hang;
  auto s = Open();
  for (uint64_t i = 0; i < 3; ++i) EXPECT_EQ(PutPage(s.get(), i), kOk);
  SteadyClock clock;
  hang.armed = true;
  TestPage out(s->format());
  auto t = s->Submit({StorageOp::kGet, {out.Item(1)}, clock.Now() + 50'000'000});
  ASSERT_TRUE(t.ok());
  std::vector<StorageCompletion> done;
  if (!uring) {
    // A call that hangs in the kernel holds the spans: no completion, however late it is.
    std::this_thread::sleep_for(std::chrono::milliseconds(120));
    EXPECT_EQ(s->Poll(&done, 1), 0u);
    hang.armed = false;
  }
  EXPECT_EQ(Await(s.get(), *t).outcomes[0], kTimeout);
  // Cancel: the same, without waiting for a deadline.
  hang.armed = true;
  t = s->Submit({StorageOp::kGet, {out.Item(2)}, 0});
  ASSERT_TRUE(t.ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  s->Cancel(*t);
  if (!uring) hang.armed = false;
  EXPECT_EQ(Await(s.get(), *t).outcomes[0], kCancelled);
  hang.armed = false;
  const auto before = out.pieces;
  for (uint64_t i = 0; i < 3; ++i) EXPECT_EQ(GetPage(s.get(), i), kOk);  // the workers survived
  EXPECT_TRUE(before == out.pieces);
  EXPECT_EQ(s->Stats().timeouts, 1);
  EXPECT_EQ(s->Stats().cancelled, 1);
}

TEST_P(FileStorageTest, CapacityHoldsAndTheLeastRecentlyUsedGoesFirst) {
  const StorageFormat small = TestFormat({5'000});
  const int64_t file = 4096 + 8192;
  FileStorageOptions o;
  o.capacity_bytes = 5 * file + 100;
  {
    auto s = Open(o, small);
    for (uint64_t i = 0; i < 5; ++i) EXPECT_EQ(PutPage(s.get(), i), kOk);
    EXPECT_EQ(GetPage(s.get(), 0), kOk);
    EXPECT_EQ(PutPage(s.get(), 5), kOk);
    EXPECT_EQ(GetPage(s.get(), 1), kMiss);
    EXPECT_EQ(GetPage(s.get(), 0), kOk);
    EXPECT_EQ(s->Stats().evicted_objects, 1);
    EXPECT_EQ(s->Stats().bytes, 5 * file);
  }
  o.capacity_bytes = 3 * file;  // a smaller capacity after a restart: room is made by the next put
  auto s = Open(o, small);
  EXPECT_EQ(s->Stats().bytes, 5 * file);
  EXPECT_EQ(PutPage(s.get(), 9), kOk);
  EXPECT_EQ(s->Stats().bytes, 3 * file);
  EXPECT_EQ(GetPage(s.get(), 9), kOk);
  o.capacity_bytes = file - 1;
  auto none = Open(o, small);
  EXPECT_EQ(PutPage(none.get(), 10), kFull);
  EXPECT_EQ(GetPage(none.get(), 9), kOk);
}

TEST_P(FileStorageTest, ClearIsSeenByEveryUserOfTheDirectory) {
  auto a = Open(), b = Open();
  EXPECT_EQ(PutPage(a.get(), 1), kOk);
  EXPECT_EQ(GetPage(b.get(), 1), kOk);
  // An object that another process keeps from being deleted is a miss nonetheless.
  fs::copy_file(PathOf(1), dir_.path() + "/kept");
  ASSERT_TRUE(b->Clear().ok());
  EXPECT_EQ(GetPage(a.get(), 1), kMiss);
  EXPECT_EQ(b->Stats().bytes, 0);
  EXPECT_EQ(PutPage(a.get(), 1), kOk);
  const std::string path = PathOf(1);
  fs::rename(dir_.path() + "/kept", path);
  EXPECT_EQ(GetPage(a.get(), 1), kMiss);
  EXPECT_EQ(PutPage(a.get(), 1), kOk);
  EXPECT_EQ(GetPage(b.get(), 1), kOk);
}

TEST_P(FileStorageTest, TooManyBatchesAreRefusedAndWrongSpansToo) {
  FileStorageOptions o;
  o.max_batches = 1;
  auto s = Open(o);
  TestPage page(s->format(), 1);
  auto t = s->Submit({StorageOp::kPut, {page.Item(1)}, 0});
  ASSERT_TRUE(t.ok());
  EXPECT_TRUE(absl::IsResourceExhausted(s->Submit({StorageOp::kExists, {{TestKey(1), {}}}, 0}).status()));
  EXPECT_EQ(Await(s.get(), *t).outcomes[0], kOk);
  StorageItem item = page.Item(1);
  item.spans.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(s->Submit({StorageOp::kPut, {item}, 0}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(s->Submit({StorageOp::kPut, {}, 0}).status()));
}

// Two writers at a time are killed in the middle, 26 of them for each engine; they share the directory and
// its capacity bound. What a reader then gets is always either nothing or exactly what was put.
TEST_P(FileStorageTest, KillingWritersLeavesOnlyWholeObjects) {
  const StorageFormat format = TestFormat({60'000, 3'000});
  FileStorageOptions o;
  o.capacity_bytes = 2'000'000;
  SeededStream random(7);
  int64_t found = 0;
  for (int round = 0; round < 13; ++round) {
    pid_t child[2];
    for (pid_t& pid : child) {
      pid = ::fork();
      if (pid == 0) {
        auto s = Open(o, format);
        if (s == nullptr) _exit(1);
        for (uint64_t i = 0;; ++i) {
          if (PutPage(s.get(), (i + uint64_t(round) * 7) % 40) != kOk) _exit(2);
          if (i % 5 == 4 && GetPage(s.get(), i % 40) == kCorrupt) _exit(3);
        }
      }
    }
    ::usleep(useconds_t(3'000 + random.Below(25'000)));
    for (pid_t pid : child) {
      ::kill(pid, SIGKILL);
      int status = 0;
      ::waitpid(pid, &status, 0);
      EXPECT_TRUE(WIFSIGNALED(status)) << "child ended by itself: " << WEXITSTATUS(status);
    }
    auto s = Open(o, format);
    EXPECT_EQ(FilesUnder("tmp"), 1);
    // Counts of several writers drift while one of them walks the directory; opened alone they are exact
    // again.
    EXPECT_EQ(PutPage(s.get(), 40 + uint64_t(round)), kOk);
    EXPECT_LE(s->Stats().bytes, o.capacity_bytes);
    for (uint64_t i = 0; i < 40; ++i) {
      const StorageOutcome g = GetPage(s.get(), i);
      EXPECT_TRUE(g == kOk || g == kMiss) << Name(g);
      found += g == kOk;
    }
  }
  EXPECT_GT(found, 50);
}

TEST(FileStorage, DirectoryThatCannotBeMadeIsRefusedWithItsName) {
  FileStorageOptions o;
  o.directory = "/proc/none/kv";
  auto s = FileStorage::Open(TestFormat(), o);
  ASSERT_FALSE(s.ok());
  EXPECT_NE(std::string(Message(s.status())).find("/proc/none"), std::string::npos);
}

}  // namespace
}  // namespace sluice
