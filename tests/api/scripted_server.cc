// A server over the scripted engine, for tests from outside: scripted_server [--port N] [--step-us N]
// [--max-running N]
// [--max-queued N] [--context N] [--api-key KEY] [--shutdown-timeout S] [--ping-interval S] [--write-stall S]
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>

#include "byte_tokenizer.h"
#include "scripted_engine.h"
#include "serve/app_server.h"
#include "serve/shutdown.h"

int main(int argc, char** argv) {
  using namespace sluice;
  BlockShutdownSignals();
  std::map<std::string, std::string> flags;
  for (int i = 1; i + 1 < argc; i += 2) flags[argv[i]] = argv[i + 1];
  const auto number = [&](const char* name, double fallback) {
    return flags.contains(name) ? std::atof(flags[name].c_str()) : fallback;
  };
  SteadyClock clock;
  ScriptedOptions script;
  script.step_us = int64_t(number("--step-us", 1000));
  script.max_running = int64_t(number("--max-running", 64));
  script.max_queued = int64_t(number("--max-queued", 64));
  script.context = int64_t(number("--context", 65536));
  ScriptedEngine engine(script);
  AppServerOptions options;
  options.http.port = uint16_t(number("--port", 0));
  options.http.write_stall_s = number("--write-stall", 30);
  options.model_name = "scripted";
  options.version = "test";
  options.api_key = flags["--api-key"];
  options.limits.vocab_size = 259;
  options.limits.context_length = script.context;
  if (flags.contains("--tool-call-parser")) {
    options.tool_calls = ParseToolCallStyle(flags["--tool-call-parser"]).value();
    options.reasoning = ReasoningStyle::kThinkTags;
  }
  options.stop_tokens = {kScriptEnd};
  options.ping_interval_s = number("--ping-interval", 10);
  auto server = AppServer::Start(std::move(options), &engine, MakeByteTokenizer(),
                                 std::make_shared<JoiningTemplate>(), &clock);
  if (!server.ok()) {
    std::cerr << server.status().message() << "\n";
    return 3;
  }
  std::cout << "sluice is ready: scripted at http://127.0.0.1:" << (*server)->port() << std::endl;
  ServeUntilSignal(server->get(), &engine, &clock, number("--shutdown-timeout", 30));
  return 0;
}
