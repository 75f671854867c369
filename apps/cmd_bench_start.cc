// sluice bench start: from the start of a server to its first token, and the memory that it then holds
// against the bound of weights + committed KV + 300 MiB.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>

#include "commands.h"
#include "fmt/format.h"
#include "http/client.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

double Since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

// `sluice serve` of this very file as a child; ended with the object.
class ServerProcess {
 public:
  ~ServerProcess() {
    if (out_ >= 0) ::close(out_);
    if (pid_ <= 0) return;
    ::kill(pid_, SIGTERM);
    for (int i = 0; i < 500 && ::waitpid(pid_, nullptr, WNOHANG) == 0; ++i) ::usleep(10'000);
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }

  // Starts it and waits for its ready line; returns the URL in it.
  StatusOr<std::string> Start(const std::vector<std::string>& flags) {
    int ends[2];
    if (::pipe(ends) != 0) return Unavailable("no pipe");
    std::vector<std::string> args = {"/proc/self/exe", "serve", "--port", "0"};
    args.insert(args.end(), flags.begin(), flags.end());
    std::vector<char*> argv;
    for (std::string& a : args) argv.push_back(a.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(ends[1], 1);
      ::close(ends[0]);
      ::close(ends[1]);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    ::close(ends[1]);
    out_ = ends[0];
    std::string text;
    char c;
    while (::read(out_, &c, 1) == 1 && c != '\n') text += c;
    const size_t url = text.find("http://");
    if (url == text.npos) return Unavailable("the server did not start: {}", text);
    return text.substr(url);
  }

 private:
  pid_t pid_ = -1;
  int out_ = -1;
};

StatusOr<Json> Call(HttpClient* client, const HttpUrl& url, const char* method, const char* path,
                    const Json& body) {
  HttpCall call{.url = url};
  call.request = {.method = method, .path = path, .headers = {{"Content-Type", "application/json"}}};
  if (!body.is_null()) call.request.body = body.dump();
  ASSIGN_OR_RETURN(const HttpResponse response, client->Fetch(std::move(call)));
  if (response.status != 200) return Unavailable("{} answers {}: {}", path, response.status, response.body);
  return Json::parse(response.body, nullptr, /*allow_exceptions=*/false);
}

int64_t StatusBytes(pid_t pid, const std::string& key) {
  std::ifstream in(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(key + ":")) return std::strtoll(line.c_str() + key.size() + 1, nullptr, 10) * 1024;
  }
  return 0;
}

StatusOr<Json> Measure(const std::vector<std::string>& flags, int64_t fill_tokens) {
  auto client = HttpClient::Make();
  ServerProcess server;
  const auto start = Clock::now();
  ASSIGN_OR_RETURN(const std::string address, server.Start(flags));
  const double ready_s = Since(start);
  ASSIGN_OR_RETURN(const HttpUrl url, HttpUrl::Parse(address));
  const Json one = {{"max_new_tokens", 1}, {"temperature", 0}};
  RETURN_IF_ERROR(
      Call(client.get(), url, "POST", "/generate", {{"text", "Hello"}, {"sampling_params", one}}).status());
  const double first_token_s = Since(start);
  ASSIGN_OR_RETURN(const Json info, Call(client.get(), url, "GET", "/server_info", nullptr));
  const Json& memory = info["memory"];
  const int64_t idle = StatusBytes(server.pid(), "VmRSS");
  // Prompts of their own until that much of the cache is in use.
  const int64_t length = std::min<int64_t>(2048, info["context_length"].get<int64_t>() - 1);
  fill_tokens = std::min(fill_tokens, memory["device_tokens"].get<int64_t>());
  int64_t cached = 0;
  for (int64_t i = 0; cached < fill_tokens; ++i) {
    Json ids = Json::array();
    for (int64_t t = 0; t < length; ++t) ids.push_back((t * 31 + i * 977 + (t == 0 ? i : 0)) % 1500);
    RETURN_IF_ERROR(
        Call(client.get(), url, "POST", "/generate", {{"input_ids", ids}, {"sampling_params", one}})
            .status());
    cached += length;
  }
  const int64_t token_bytes = info["kv_layout"]["bytes_per_token"].get<int64_t>();
  const int64_t weights = memory["weight_bytes"].get<int64_t>();
  const int64_t rss = StatusBytes(server.pid(), "VmRSS");
  const int64_t committed = cached * token_bytes;
  const int64_t bound = weights + committed + (300 << 20);
  return Json{{"ready_s", ready_s},
              {"first_token_s", first_token_s},
              {"weight_bytes", weights},
              {"rss_bytes_idle", idle},
              {"cached_tokens", cached},
              {"committed_kv_bytes", committed},
              {"rss_bytes", rss},
              {"rss_bound_bytes", bound},
              {"peak_rss_bytes", StatusBytes(server.pid(), "VmHWM")}};
}

}  // namespace

int RunBenchStart(const std::vector<std::string>& args) {
  // Flags of the server come behind "--".
  const auto split = std::find(args.begin(), args.end(), "--");
  const std::vector<std::string> mine(args.begin(), split);
  const std::vector<std::string> flags(split == args.end() ? split : split + 1, args.end());
  int64_t fill = 16384;
  double limit_s = 3;
  bool check = false, check_memory = false;
  std::string json;
  CLI::App app(
      "From the start of a server to its first token, and its memory; flags of the server come behind --",
      "sluice bench start");
  app.option_defaults()->always_capture_default();
  app.add_option("--fill-tokens", fill, "tokens that are in the cache when memory is read")
      ->check(CLI::Range(0, 1 << 30));
  app.add_option("--limit", limit_s, "seconds to the first token that --check allows");
  app.add_flag("--check", check, "exit 1 when a bound is missed");
  app.add_flag("--check-memory", check_memory, "exit 1 when the memory bound is missed");
  app.add_option("--json", json, "write one JSON document there, - for stdout")->type_name("FILE");
  if (const auto code = ParseWords(&app, "bench start", mine)) return *code;
  const StatusOr<Json> r = Measure(flags, fill);
  if (!r.ok()) return FailWith("bench start", r.status());
  const auto mib = [&](const char* key) { return double((*r)[key].get<int64_t>()) / (1 << 20); };
  const double first = (*r)["first_token_s"].get<double>();
  const bool slow = first > limit_s, large = mib("rss_bytes") > mib("rss_bound_bytes");
  if (json == "-") {
    std::cout << r->dump(2) << "\n";
  } else {
    if (std::ofstream out(json); !json.empty() && !(out << r->dump(2) << "\n"))
      return FailWith("bench start", Unavailable("--json: cannot write {}", json));
    std::cout << fmt::format(
        "ready after {:.2f} s, first token after {:.2f} s (limit {:.2f}){}\n"
        "memory: weights {:.0f} MiB, idle {:.0f} MiB, with {} cached tokens ({:.0f} MiB) {:.0f} MiB, bound "
        "{:.0f} MiB{}\n",
        (*r)["ready_s"].get<double>(), first, limit_s, slow ? " MISSED" : "", mib("weight_bytes"),
        mib("rss_bytes_idle"), (*r)["cached_tokens"].get<int64_t>(), mib("committed_kv_bytes"),
        mib("rss_bytes"), mib("rss_bound_bytes"), large ? " MISSED" : "");
  }
  return (check && (slow || large)) || (check_memory && large) ? kExitCheckFailed : kExitOk;
}

}  // namespace sluice
