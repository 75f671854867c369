// The OpenAI-compatible server: routes, keys, limits, health and shutdown over one engine.
//
//   HttpServer -> CheckHead (route, method, key, content type) -> Handle -> WorkPool: parse, tokenise ->
//   Generation -> engine
//
// Routes: see docs/api.md. Without a key anybody may ask /health only; everything else needs it when one is
// set.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "api/requests.h"
#include "base/clock.h"
#include "base/status.h"
#include "engine/engine.h"
#include "grammar/constraint.h"
#include "http/server.h"
#include "nlohmann/json.hpp"
#include "serve/api_key.h"
#include "serve/generation.h"
#include "serve/live_feed.h"
#include "serve/origins.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace sluice {

// The storage tier as the admin routes see it; without functions the routes say that there is none.
struct StorageAdmin {
  std::function<nlohmann::ordered_json()> describe;
  std::function<Status(const nlohmann::ordered_json& body)> attach;
  std::function<Status()> detach, clear;
};

struct AppServerOptions {
  HttpServerOptions http;
  std::string model_name, model_path, version;
  std::string api_key, admin_api_key;  // admin: flush; "" = the api key
  Origins origins;                     // web pages that may call
  ApiLimits limits;                    // vocab_size and context_length are filled from the model
  SamplingDefaults defaults;
  ToolCallStyle tool_calls = ToolCallStyle::kNone;  // how the model writes them
  ReasoningStyle reasoning = ReasoningStyle::kNone;
  std::vector<int32_t> stop_tokens;  // the model's ends of an answer: a bound answer ends with one of them
  int mask_threads = 1;
  bool sglang_metrics = false;
  bool page = true;  // the page at "/" and its /live stream
  double ping_interval_s = 10;
  double request_timeout_s = 0;       // of a request that names none; 0: none
  size_t long_text_bytes = 32 << 10;  // bodies from here on are parsed on the long lane
  WorkPool::Options pool;
  nlohmann::ordered_json server_info;  // resolved flags and what the engine says of itself; never a key
  nlohmann::ordered_json model_info;
  StorageAdmin storage;
};

class AppServer final : public HttpHandler {
 public:
  // Listens at once. chat_template may be null: chat requests are refused then. The engine and the clock
  // outlive the server.
  static StatusOr<std::unique_ptr<AppServer>> Start(AppServerOptions options, Engine* engine,
                                                    std::shared_ptr<const Tokenizer> tokenizer,
                                                    std::shared_ptr<const ChatTemplate> chat_template,
                                                    const Clock* clock);
  ~AppServer() override;

  uint16_t port() const { return http_->port(); }
  // From now on /health says 503 and new work is refused with 503; what runs goes on.
  void BeginDrain() { draining_ = true; }
  // Answers that are complete get out, then everything is closed. The engine must be idle or told to abort.
  void Stop(double grace_s);

  std::optional<HttpResponse> CheckHead(const HttpRequest& head) override;
  HttpHeaders AnswerHeaders(const HttpRequest& request) override {
    return options_.origins.AnswerHeaders(request);
  }
  void Handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) override;
  HttpResponse ErrorResponse(HttpError error, std::string_view detail) override;

 private:
  struct Route {
    std::string_view path;
    std::string_view methods;  // "GET POST"
    enum Body : uint8_t { kNone, kJson } body;
    enum Access : uint8_t { kOpen, kKey, kAdmin } access;
    void (AppServer::*handle)(HttpRequest&, const std::shared_ptr<HttpExchange>&);
    WorkLane lane = WorkLane::kShort;
  };
  static std::span<const Route> Routes();
  static const Route* FindRoute(std::string_view path);

  AppServer(AppServerOptions options, Engine* engine, std::shared_ptr<const Tokenizer> tokenizer,
            std::shared_ptr<const ChatTemplate> chat_template, const Clock* clock);

  // submit.cc: JSON -> tokens -> engine
  void Chat(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void Messages(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void CountTokens(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  // What chat and messages share: prompt, parser and constraint of a parsed request.
  std::optional<ApiError> Bind(const ConstraintRequest& request, std::string_view field,
                               std::shared_ptr<const TokenConstraint>* out) const;
  // The constraint that a request's own fields ask for; none: *out stays null.
  std::optional<ApiError> BindAnswer(const ConstraintSpec& spec, ConstraintRequest::Reasoning reasoning,
                                     std::shared_ptr<const TokenConstraint>* out) const;
  std::optional<ApiError> PrepareChat(ChatRequest* request, GenerationSpec* spec) const;
  void Completions(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void Generate(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void Tokenize(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void Detokenize(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  std::optional<ApiError> EncodePrompt(const PromptInput& input, std::string_view field,
                                       std::vector<int32_t>* ids) const;
  std::optional<ApiError> EncodeChat(const nlohmann::ordered_json& messages,
                                     const nlohmann::ordered_json& kwargs, bool add_generation_prompt,
                                     std::vector<int32_t>* ids, std::string_view prefill = {},
                                     bool* opens_reasoning = nullptr) const;
  std::optional<ApiError> CheckTextBytes(std::string_view field, size_t bytes) const;
  // Checks the context, settles max_tokens, seed and timeout. `index` tells the seeds of one request's
  // prompts apart.
  std::optional<ApiError> Settle(GenerationOptions* options, size_t prompt_tokens, size_t index) const;
  void LaunchOrReject(std::optional<ApiError> error, AnswerForm form, GenerationSpec spec, Nanos arrival,
                      const std::shared_ptr<HttpExchange>& exchange);
  AnswerMeta NewMeta(std::string_view prefix, const GenerationOptions& options) const;

  // admin.cc
  void Health(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void HealthGenerate(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void Models(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void TokenizerInfo(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void ModelInfo(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void ServerInfo(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void Loads(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void Page(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void Live(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void Metrics(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void FlushCache(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void Storage(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void ClearStorage(HttpRequest&, const std::shared_ptr<HttpExchange>&);
  void AbortRequests(HttpRequest&, const std::shared_ptr<HttpExchange>&);

  std::optional<HttpResponse> CheckRoute(const HttpRequest& head) const;
  HttpResponse Refusal(const ApiError& error) const;
  HttpResponse Unauthorized() const;
  void AnswerStorage(const Status& status, const std::shared_ptr<HttpExchange>& exchange);

  AppServerOptions options_;
  Engine* const engine_;
  const std::shared_ptr<const Tokenizer> tokenizer_;
  const std::shared_ptr<const ChatTemplate> chat_template_;
  const std::unique_ptr<ConstraintCompiler> constraints_;
  const Clock* const clock_;
  const ApiKey key_, admin_key_;
  const int64_t started_unix_s_;
  ServeMetrics metrics_;
  RunningRequests running_;
  GenerationContext context_;
  std::atomic<bool> draining_{false};
  std::unique_ptr<LiveFeed> live_;  // null: no page
  std::unique_ptr<WorkPool> pool_;
  std::unique_ptr<HttpServer> http_;
};

}  // namespace sluice
