#include "sim/search.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <memory>
#include <string_view>

namespace sluice::sim {
namespace {

using SteadyTime = std::chrono::steady_clock::time_point;
constexpr uint64_t kSeedsPerBlock = 16;  // of one child; small enough that jobs end together

// A child reports by lines: "B scenario seed" begin, "V text" violation, "C n name" coverage, "E events" end.
// What it prints to stderr (a failed check) comes back through a second pipe.
struct Child {
  pid_t pid = -1;
  int out = -1, err = -1;
  std::string out_text, err_text;
  size_t scenario = 0;
  uint64_t next = 0, end = 0;  // seeds not begun yet
  bool in_seed = false;
  uint64_t seed = 0;
  bool seed_failed = false;
  SteadyTime seed_began;
  bool too_long = false;
};

std::string OneLine(std::string s) {
  std::replace(s.begin(), s.end(), '\n', ' ');
  return s;
}

[[noreturn]] void RunChild(const Scenario& scenario, size_t index, uint64_t from, uint64_t end, int out) {
  FILE* f = ::fdopen(out, "w");
  for (uint64_t seed = from; seed != end; ++seed) {
    std::fprintf(f, "B %zu %llu\n", index, static_cast<unsigned long long>(seed));
    std::fflush(f);
    const SeedReport r = scenario.run(seed, false);
    for (const std::string& v : r.violations) std::fprintf(f, "V %s\n", OneLine(v).c_str());
    for (const auto& [name, n] : r.coverage)
      std::fprintf(f, "C %lld %s\n", static_cast<long long>(n), name.c_str());
    std::fprintf(f, "E %lld\n", static_cast<long long>(r.events));
    std::fflush(f);
  }
  std::fclose(f);
  ::_exit(0);
}

class Runner {
 public:
  explicit Runner(const SearchOptions& options) : o_(options) {
    for (size_t s = 0; s < o_.scenarios.size(); ++s) scenario_next_.push_back(o_.first);
  }
  StatusOr<SearchResult> Run() {
    for (;;) {
      while (int(children_.size()) < std::max(1, o_.jobs) && MoreBlocks())
        if (Status s = StartBlock(); !s.ok()) return s;
      if (children_.empty()) break;
      Wait();
    }
    std::sort(result_.findings.begin(), result_.findings.end(), [](const Finding& a, const Finding& b) {
      return std::pair(a.seed, std::string_view(a.scenario)) <
             std::pair(b.seed, std::string_view(b.scenario));
    });
    return std::move(result_);
  }

 private:
  bool MoreBlocks() const {
    if (o_.stop_at_first && result_.violations > 0) return false;
    return std::any_of(scenario_next_.begin(), scenario_next_.end(), [&](uint64_t n) { return n != o_.end; });
  }
  Status StartBlock() {
    // The scenario that is furthest behind, so that all reach a seed at about the same time.
    const auto least = std::min_element(scenario_next_.begin(), scenario_next_.end());
    const size_t s = size_t(least - scenario_next_.begin());
    const uint64_t from = *least, end = from + std::min<uint64_t>(kSeedsPerBlock, o_.end - from);
    *least = end;
    return Start(s, from, end);
  }
  Status Start(size_t scenario, uint64_t from, uint64_t end) {
    int out[2], err[2];
    if (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0)
      return Unavailable("pipe: {}", std::strerror(errno));
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid < 0) return Unavailable("fork: {}", std::strerror(errno));
    if (pid == 0) {
      ::dup2(err[1], 2);
      ::close(out[0]);
      ::close(err[0]);
      RunChild(o_.scenarios[scenario], scenario, from, end, out[1]);
    }
    ::close(out[1]);
    ::close(err[1]);
    auto c = std::make_unique<Child>();
    c->pid = pid;
    c->out = out[0];
    c->err = err[0];
    c->scenario = scenario;
    c->next = from;
    c->end = end;
    c->seed_began = std::chrono::steady_clock::now();
    children_.push_back(std::move(c));
    return OkStatus();
  }

  void Wait() {
    std::vector<pollfd> fds;
    for (const auto& c : children_) {
      fds.push_back({c->out, POLLIN, 0});
      fds.push_back({c->err, POLLIN, 0});
    }
    ::poll(fds.data(), fds.size(), 200);
    const auto now = std::chrono::steady_clock::now();
    for (size_t i = children_.size(); i-- > 0;) {
      Child& c = *children_[i];
      if (fds[2 * i + 1].revents != 0) Read(c.err, &c.err_text);
      if (c.err_text.size() > 4096) c.err_text.erase(0, c.err_text.size() - 4096);
      bool over = false;
      if (fds[2 * i].revents != 0) over = !Read(c.out, &c.out_text);
      TakeLines(&c);
      if (!over && !c.too_long && c.in_seed &&
          now - c.seed_began > std::chrono::seconds(o_.seconds_per_seed)) {
        c.too_long = true;
        ::kill(c.pid, SIGKILL);
      }
      if (over) {
        Reap(i);
      }
    }
    if (o_.progress) o_.progress(result_.runs, result_.violations);
  }

  static bool Read(int fd, std::string* to) {  // false: the other end is closed
    char buffer[16384];
    const ssize_t n = ::read(fd, buffer, sizeof(buffer));
    if (n > 0) to->append(buffer, size_t(n));
    return n > 0 || (n < 0 && errno == EINTR);
  }

  void TakeLines(Child* c) {
    size_t at = 0;
    for (size_t end; (end = c->out_text.find('\n', at)) != std::string::npos; at = end + 1) {
      const std::string_view line = std::string_view(c->out_text).substr(at, end - at);
      const std::string_view rest = line.substr(2);
      const auto number = [](std::string_view s) {
        int64_t n = 0;
        std::from_chars(s.data(), s.data() + s.size(), n);
        return n;
      };
      switch (line[0]) {
        case 'B': {
          const std::string_view seed = rest.substr(rest.find(' ') + 1);
          std::from_chars(seed.data(), seed.data() + seed.size(), c->seed);
          c->next = c->seed + 1;
          c->in_seed = true;
          c->seed_failed = false;
          c->seed_began = std::chrono::steady_clock::now();
          break;
        }
        case 'V':
          Found(c, std::string(rest));
          break;
        case 'C':
          result_.coverage[std::string(rest.substr(rest.find(' ') + 1))] += number(rest);
          break;
        default:
          result_.events += number(rest);
          ++result_.runs;
          c->in_seed = false;
      }
    }
    c->out_text.erase(0, at);
  }

  void Found(Child* c, std::string what) {
    if (c->seed_failed) return;
    c->seed_failed = true;
    ++result_.violations;
    if (result_.findings.size() < 100)
      result_.findings.push_back({std::string(o_.scenarios[c->scenario].name), c->seed, std::move(what)});
  }

  void Reap(size_t i) {
    std::unique_ptr<Child> c = std::move(children_[i]);
    children_.erase(children_.begin() + long(i));
    while (Read(c->err, &c->err_text)) {
    }
    ::close(c->out);
    ::close(c->err);
    int status = 0;
    ::waitpid(c->pid, &status, 0);
    if (c->in_seed) {
      const std::string said = OneLine(c->err_text.substr(0, 400));
      if (c->too_long)
        Found(c.get(), fmt::format("took longer than {} s: a loop without end", o_.seconds_per_seed));
      else if (WIFSIGNALED(status))
        Found(c.get(), fmt::format("{}: {}", ::strsignal(WTERMSIG(status)), said));
      else
        Found(c.get(), fmt::format("exit {}: {}", WEXITSTATUS(status), said));
      ++result_.runs;
    }
    if (c->next != c->end && !(o_.stop_at_first && result_.violations > 0))
      (void)Start(c->scenario, c->next, c->end);
  }

  const SearchOptions& o_;
  std::vector<uint64_t> scenario_next_;
  std::vector<std::unique_ptr<Child>> children_;
  SearchResult result_;
};

}  // namespace

StatusOr<SearchResult> Search(const SearchOptions& options) {
  if (options.scenarios.empty()) return Invalid("search: no scenario");
  if (options.first > options.end)
    return Invalid("--seeds: {}..{} ends before it begins", options.first, options.end);
  return Runner(options).Run();
}

}  // namespace sluice::sim
