// sluice router: the front door of several servers.
#include <unistd.h>

#include <csignal>
#include <ctime>
#include <iostream>

#include "base/log.h"
#include "commands.h"
#include "config/flags.h"
#include "http/client.h"
#include "router/router.h"
#include "serve/live_feed.h"
#include "serve/shutdown.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "version.h"

namespace sluice {
namespace {

using router::Router;
using router::RouterOptions;
using router::WorkerSpec;

const CommandSyntax kSyntax = {
    .usage =
        "sluice router --prefill URL BOOTSTRAP_PORT --decode URL [options] | sluice router --worker URL "
        "[options]",
    .summary = "Takes requests for several servers: prefill and decode instances, or whole servers.",
    .options =
        {
            {"--prefill", "URL BOOTSTRAP_PORT", "a prefill instance and its bootstrap port; repeatable"},
            {"--decode", "URL", "a decode instance; repeatable"},
            {"--worker", "URL", "a server that does both; repeatable; without --prefill and --decode"},
            {"--policy", "NAME", "cache_aware (default), power_of_two, round_robin or random"},
            {"--prefill-policy", "NAME", "of the prefill side (default: --policy)"},
            {"--decode-policy", "NAME", "of the decode side (default: --policy)"},
            {"--host", "ADDRESS", "where to listen (default 127.0.0.1)"},
            {"--port", "PORT", "(default 30000)"},
            {"--health-check-interval", "SECONDS", "(default 2)"},
            {"--health-check-timeout", "SECONDS", "(default 5)"},
            {"--health-failure-threshold", "N",
             "failed checks in a row after which an instance is ill (default 2)"},
            {"--request-timeout", "SECONDS", "without a byte from an instance (default 1800)"},
            {"--write-stall", "SECONDS", "a client that takes no byte for so long is dropped (default 30)"},
            {"--retries", "N", "on other instances, when one fails before it has answered (default 1)"},
            {"--max-connections", "N", "(default 8192)"},
            {"--max-body-bytes", "N", "(default 16777216)"},
            {"--shutdown-timeout", "SECONDS",
             "how long running requests may go on after SIGTERM (default 30)"},
            {"--disable-page", "", "no page at / and no live data at /live"},
            {"--log-level", "LEVEL", "trace, debug, info (default), warning, error"},
        },
};

StatusOr<RouterOptions> OptionsFrom(const CommandLine& line) {
  RouterOptions o;
  for (const auto& words : line.All("--prefill")) {
    ASSIGN_OR_RETURN(const int64_t port, ParseInt(words[1]));
    if (port < 1 || port > 65535)
      return Invalid("--prefill {} {}: the bootstrap port is not from 1 to 65535", words[0], words[1]);
    o.workers.push_back({WorkerSpec::Role::kPrefill, words[0], int(port)});
  }
  for (const auto& words : line.All("--decode"))
    o.workers.push_back({WorkerSpec::Role::kDecode, words[0], 0});
  for (const auto& words : line.All("--worker")) o.workers.push_back({WorkerSpec::Role::kWhole, words[0], 0});
  o.policy = line.Text("--policy", "cache_aware");
  o.prefill_policy = line.Text("--prefill-policy");
  o.decode_policy = line.Text("--decode-policy");
  o.http.host = line.Text("--host", "127.0.0.1");
  ASSIGN_OR_RETURN(const int64_t port, line.Int("--port", 30000, 0, 65535));
  o.http.port = uint16_t(port);
  ASSIGN_OR_RETURN(o.health_interval_s, line.Real("--health-check-interval", 2));
  ASSIGN_OR_RETURN(o.health_timeout_s, line.Real("--health-check-timeout", 5));
  if (!(o.health_interval_s >= 0.05) || !(o.health_timeout_s >= 0.05))
    return Invalid("--health-check-interval and --health-check-timeout are at least 0.05");
  ASSIGN_OR_RETURN(const int64_t failures, line.Int("--health-failure-threshold", 2, 1, 1000));
  o.health_failures = int(failures);
  ASSIGN_OR_RETURN(o.request_timeout_s, line.Real("--request-timeout", 1800));
  if (!(o.request_timeout_s > 0))
    return Invalid("--request-timeout {} is not above 0", line.Text("--request-timeout"));
  ASSIGN_OR_RETURN(o.http.write_stall_s, line.Real("--write-stall", o.http.write_stall_s));
  if (!(o.http.write_stall_s > 0))
    return Invalid("--write-stall {} is not above 0", line.Text("--write-stall"));
  ASSIGN_OR_RETURN(const int64_t retries, line.Int("--retries", 1, 0, 16));
  o.retries = int(retries);
  ASSIGN_OR_RETURN(o.http.max_connections, line.Int("--max-connections", 8192, 1, 1 << 20));
  ASSIGN_OR_RETURN(const int64_t body, line.Int("--max-body-bytes", 16 << 20, 1024, int64_t(1) << 32));
  o.http.max_body_bytes = uint64_t(body);
  o.version = std::string(Version());
  if (!line.Has("--disable-page")) o.page = PageResponse();
  return o;
}

Status RunUntilSignal(const CommandLine& line) {
  ASSIGN_OR_RETURN(const RouterOptions options, OptionsFrom(line));
  ASSIGN_OR_RETURN(const double patience, line.Real("--shutdown-timeout", 30));
  auto logger = spdlog::stderr_logger_mt("sluice");
  logger->set_pattern("%Y-%m-%d %H:%M:%S.%e %l %v");
  logger->set_level(spdlog::level::from_str(line.Text("--log-level", "info")));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
  ASSIGN_OR_RETURN(std::unique_ptr<Router> router, Router::Start(options));
  std::cout << fmt::format("sluice router is ready: {} instances at {}", options.workers.size(),
                           HttpUrl{.host = options.http.host, .port = router->port()}.ToString())
            << std::endl;
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  int signal = 0;
  while (sigwait(&set, &signal) != 0) {
  }
  spdlog::info("signal {}: no new requests; {} running ones may go on for {} s", signal, router->running(),
               patience);
  router->BeginDrain();
  const timespec step{0, 20'000'000};
  for (double waited = 0; router->running() > 0 && waited < patience; waited += 0.02) {
    if (sigtimedwait(&set, nullptr, &step) > 0) {
      spdlog::warn("signal again: leaving at once");
      _exit(128 + signal);
    }
  }
  if (router->running() > 0) {
    spdlog::warn("{} requests are ended: their time is over", router->running());
    router->EndAll("the router is shutting down and the time for running requests is over");
  }
  router->Stop(0);
  spdlog::info("bye");
  return OkStatus();
}

}  // namespace

int RunRouter(const std::vector<std::string>& args) {
  BlockShutdownSignals();
  auto line = ParseCommandLine(args, kSyntax);
  if (!line.ok()) return FailWith("router", line.status());
  if (line->help) {
    std::cout << HelpText(kSyntax);
    return kExitOk;
  }
  if (const Status status = RunUntilSignal(*line); !status.ok()) return FailWith("router", status);
  return kExitOk;
}

}  // namespace sluice
