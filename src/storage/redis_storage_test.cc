#include "storage/redis_storage.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/random.h"
#include "storage/storage_fixture.h"

namespace sluice {
namespace {

using enum StorageOutcome;

bool Free(int port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  a.sin_port = htons(uint16_t(port));
  const bool free = ::bind(fd, reinterpret_cast<sockaddr*>(&a), sizeof(a)) == 0;
  ::close(fd);
  return free;
}

// A free port whose cluster bus port (10000 above) is free too; below the ports that the system hands out.
int FreePort() {
  static SeededStream random(uint64_t(::getpid()) * 7919);
  for (int i = 0; i < 1000; ++i) {
    const int port = 11000 + int(random.Below(11000));
    if (Free(port) && Free(port + 10000)) return port;
  }
  ADD_FAILURE() << "no free port";
  return 0;
}

// A real server of our own on a free port.
class Server {
 public:
  explicit Server(std::vector<std::string> extra = {}) : port_(FreePort()), extra_(std::move(extra)) {
    Start();
  }
  ~Server() { Kill(); }

  void Start() {
    std::vector<std::string> args = {"redis-server",
                                     "--port",
                                     std::to_string(port_),
                                     "--bind",
                                     "127.0.0.1",
                                     "--save",
                                     "",
                                     "--appendonly",
                                     "no",
                                     "--dir",
                                     dir_.path(),
                                     "--loglevel",
                                     "warning"};
    args.insert(args.end(), extra_.begin(), extra_.end());
    std::vector<char*> argv;
    for (auto& a : args) argv.push_back(a.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(::open("/dev/null", 2), 1);
      ::execvp(argv[0], argv.data());
      ::_exit(127);
    }
    for (int i = 0; i < 500; ++i) {
      if (Ask("PING") == "PONG") return;
      int status;
      if (::waitpid(pid_, &status, WNOHANG) == pid_) break;
      ::usleep(10'000);
    }
    pid_ = -1;
    failed_ = true;
  }
  void Kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  void Signal(int s) { ::kill(pid_, s); }
  std::string Ask(const std::string& command) const {
    redisContext* c = redisConnectWithTimeout("127.0.0.1", port_, {0, 200'000});
    std::string text;
    if (c != nullptr && c->err == 0) {
      auto* r = static_cast<redisReply*>(redisCommand(c, command.c_str()));
      if (r != nullptr)
        text = r->type == REDIS_REPLY_INTEGER ? std::to_string(r->integer) : r->str ? r->str : "";
      if (r != nullptr) freeReplyObject(r);
    }
    redisFree(c);
    return text;
  }
  int port() const { return port_; }
  bool failed() const { return failed_; }

 private:
  TempDirectory dir_;
  int port_;
  std::vector<std::string> extra_;
  pid_t pid_ = -1;
  bool failed_ = false;
};

#define REQUIRE_SERVER(s) \
  ASSERT_FALSE((s).failed()) << "redis-server cannot be started here; scripts/setup.sh installs it"

std::unique_ptr<RedisStorage> Open(const Server& server, RedisStorageOptions o = {}) {
  o.port = server.port();
  o.reconnect_pause = 20'000'000;
  auto s = RedisStorage::Open(TestFormat(), o);
  if (!s.ok()) {
    ADD_FAILURE() << s.status();
    return nullptr;
  }
  return *std::move(s);
}

TEST(RedisStorage, KeepsObjectsForOtherProcessesAndClears) {
  Server server;
  REQUIRE_SERVER(server);
  auto a = Open(server);
  EXPECT_EQ(GetPage(a.get(), 1), kMiss);
  EXPECT_EQ(PutPage(a.get(), 1), kOk);
  EXPECT_EQ(PutPage(a.get(), 1), kOk);
  EXPECT_EQ(a->Stats().puts, 1);
  EXPECT_EQ(a->Stats().puts_present, 1);
  auto b = Open(server);
  EXPECT_EQ(GetPage(b.get(), 1), kOk);
  EXPECT_EQ(RunBatch(b.get(), StorageOp::kExists, {{TestKey(1), {}}, {TestKey(2), {}}}),
            (std::vector<StorageOutcome>{kOk, kMiss}));
  ASSERT_TRUE(b->Clear().ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  EXPECT_EQ(GetPage(a.get(), 1), kMiss);
  EXPECT_EQ(server.Ask("DBSIZE"), "1");  // the generation
  EXPECT_EQ(PutPage(a.get(), 1), kOk);
  EXPECT_EQ(RunBatch(a.get(), StorageOp::kDelete, {{TestKey(1), {}}})[0], kOk);
  EXPECT_EQ(GetPage(b.get(), 1), kMiss);
}

TEST(RedisStorage, ManyObjectsAtOnceComeBackRight) {
  Server server;
  REQUIRE_SERVER(server);
  auto s = Open(server);
  std::vector<TestPage> in, out;
  for (uint64_t i = 0; i < 30; ++i) in.emplace_back(s->format(), i), out.emplace_back(s->format());
  std::vector<StorageItem> puts, gets;
  for (uint64_t i = 0; i < 30; ++i) puts.push_back(in[i].Item(i)), gets.push_back(out[i].Item(i));
  EXPECT_EQ(RunBatch(s.get(), StorageOp::kPut, puts), std::vector<StorageOutcome>(30, kOk));
  EXPECT_EQ(RunBatch(s.get(), StorageOp::kGet, gets), std::vector<StorageOutcome>(30, kOk));
  for (size_t i = 0; i < 30; ++i) EXPECT_TRUE(in[i].pieces == out[i].pieces) << i;
}

TEST(RedisStorage, WrongValuesAreMissesAndAreReplaced) {
  Server server;
  REQUIRE_SERVER(server);
  auto s = Open(server);
  EXPECT_EQ(PutPage(s.get(), 2), kOk);
  const std::string key = s->KeyOf(TestKey(1)), other = s->KeyOf(TestKey(2));
  for (const std::string& damage :
       {"SET " + key + " short", "SETRANGE " + key + " 600000 x", "SETRANGE " + key + " 40 x",
        "APPEND " + key + " x", "RENAME " + other + " " + key, "LPUSH " + key + " list"}) {
    SCOPED_TRACE(damage);
    EXPECT_EQ(PutPage(s.get(), 1), kOk);
    EXPECT_EQ(GetPage(s.get(), 1), kOk);
    if (damage[0] == 'L') server.Ask("DEL " + key);
    server.Ask(damage);
    EXPECT_EQ(GetPage(s.get(), 1), kCorrupt);
    EXPECT_EQ(PutPage(s.get(), 1), kOk);
    EXPECT_EQ(GetPage(s.get(), 1), kOk);
  }
  EXPECT_EQ(s->Stats().corrupt, 6);
}

TEST(RedisStorage, ServerThatStopsStallsOrRestartsCostsMissesOnly) {
  Server server;
  REQUIRE_SERVER(server);
  auto s = Open(server);
  SteadyClock clock;
  EXPECT_EQ(PutPage(s.get(), 1), kOk);
  server.Signal(SIGSTOP);
  const Nanos start = clock.Now();
  EXPECT_EQ(GetPage(s.get(), 1, start + 100'000'000), kTimeout);
  EXPECT_LT(clock.Now() - start, 2'000'000'000);
  server.Signal(SIGCONT);
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  EXPECT_EQ(GetPage(s.get(), 1), kOk);  // not the late answer of the call before
  server.Kill();
  EXPECT_EQ(GetPage(s.get(), 1), kError);
  EXPECT_EQ(PutPage(s.get(), 3), kError);
  server.Start();
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  EXPECT_EQ(GetPage(s.get(), 1), kMiss);
  EXPECT_EQ(PutPage(s.get(), 1), kOk);
  EXPECT_EQ(GetPage(s.get(), 1), kOk);
}

TEST(RedisStorage, ServerOutOfMemorySuspendsWritingNotServing) {
  Server server({"--maxmemory", "4mb", "--maxmemory-policy", "noeviction"});
  REQUIRE_SERVER(server);
  auto s = Open(server);
  EXPECT_EQ(PutPage(s.get(), 0), kOk);
  uint64_t i = 1;
  while (i < 10 && PutPage(s.get(), i) == kOk) ++i;
  EXPECT_LT(i, 10u);
  EXPECT_TRUE(s->Stats().writes_suspended);
  EXPECT_EQ(GetPage(s.get(), 0), kOk);
}

TEST(RedisStorage, PasswordIsSentAndAWrongOneRefusedAtStart) {
  Server server;
  REQUIRE_SERVER(server);
  EXPECT_EQ(server.Ask("ACL SETUSER kv on >secret ~sluice:* +@all"), "OK");
  RedisStorageOptions o;
  o.username = "kv";
  o.password = "secret";
  auto s = Open(server, o);
  EXPECT_EQ(PutPage(s.get(), 1), kOk);
  o.password = "wrong";
  o.port = server.port();
  auto refused = RedisStorage::Open(TestFormat(), o);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(std::string(Message(refused.status())).find("WRONGPASS"), std::string::npos) << refused.status();
}

TEST(RedisStorage, AMissingPasswordIsNamedAtStart) {
  Server server;
  REQUIRE_SERVER(server);
  EXPECT_EQ(server.Ask("CONFIG SET requirepass secret"), "OK");
  RedisStorageOptions o;
  o.port = server.port();
  auto refused = RedisStorage::Open(TestFormat(), o);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(std::string(Message(refused.status())).find("NOAUTH"), std::string::npos) << refused.status();
}

// The test ends by its time limit if the end waits for a reply.
TEST(RedisStorage, TheEndDoesNotWaitForAServerThatHangs) {
  Server server;
  REQUIRE_SERVER(server);
  RedisStorageOptions o;
  o.io_timeout = 3600 * Nanos(1'000'000'000);
  o.threads = 2;
  auto s = Open(server, o);
  ASSERT_NE(s, nullptr);
  EXPECT_EQ(PutPage(s.get(), 1), kOk);
  server.Signal(SIGSTOP);
  TestPage page(s->format(), 1);
  for (uint64_t i = 1; i < 5; ++i) ASSERT_TRUE(s->Submit({StorageOp::kGet, {page.Item(i)}, 0}).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  s.reset();
  server.Signal(SIGCONT);
}

TEST(RedisStorage, ClusterNodesAreFoundByRedirection) {
  Server a({"--cluster-enabled", "yes"}), b({"--cluster-enabled", "yes"});
  REQUIRE_SERVER(a);
  REQUIRE_SERVER(b);
  EXPECT_EQ(a.Ask("CLUSTER ADDSLOTSRANGE 0 8191"), "OK");
  EXPECT_EQ(b.Ask("CLUSTER ADDSLOTSRANGE 8192 16383"), "OK");
  EXPECT_EQ(b.Ask("CLUSTER SET-CONFIG-EPOCH 2"), "OK");
  EXPECT_EQ(a.Ask("CLUSTER MEET 127.0.0.1 " + std::to_string(b.port())), "OK");
  const auto ready = [](const Server& s) {
    return s.Ask("CLUSTER INFO").find("cluster_state:ok") != std::string::npos;
  };
  for (int i = 0; i < 1000 && !(ready(a) && ready(b)); ++i) ::usleep(10'000);
  auto s = Open(a);
  ASSERT_NE(s, nullptr);
  for (uint64_t i = 0; i < 12; ++i) EXPECT_EQ(PutPage(s.get(), i), kOk) << i;
  for (uint64_t i = 0; i < 12; ++i) EXPECT_EQ(GetPage(s.get(), i), kOk) << i;
  EXPECT_NE(a.Ask("DBSIZE"), "0");
  EXPECT_NE(b.Ask("DBSIZE"), "0");
}

TEST(RedisStorage, NoServerIsAnErrorThatNamesTheAddress) {
  RedisStorageOptions o;
  o.port = FreePort();
  auto s = RedisStorage::Open(TestFormat(), o);
  ASSERT_FALSE(s.ok());
  EXPECT_NE(std::string(Message(s.status())).find(std::to_string(o.port)), std::string::npos) << s.status();
}

}  // namespace
}  // namespace sluice
