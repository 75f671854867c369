#include "serve/app_server.h"

#include <ctime>
#include <utility>

namespace sluice {

std::span<const AppServer::Route> AppServer::Routes() {
  using R = Route;
  static constexpr Route kRoutes[] = {
      {"/v1/chat/completions", "POST", R::kJson, R::kKey, &AppServer::Chat},
      {"/v1/completions", "POST", R::kJson, R::kKey, &AppServer::Completions},
      {"/v1/messages", "POST", R::kJson, R::kKey, &AppServer::Messages},
      {"/v1/messages/count_tokens", "POST", R::kJson, R::kKey, &AppServer::CountTokens},
      {"/generate", "POST", R::kJson, R::kKey, &AppServer::Generate},
      {"/tokenize", "POST", R::kJson, R::kKey, &AppServer::Tokenize},
      {"/v1/tokenize", "POST", R::kJson, R::kKey, &AppServer::Tokenize},
      {"/detokenize", "POST", R::kJson, R::kKey, &AppServer::Detokenize},
      {"/v1/detokenize", "POST", R::kJson, R::kKey, &AppServer::Detokenize},
      {"/v1/models", "GET", R::kNone, R::kKey, &AppServer::Models},
      {"/tokenizer_info", "GET", R::kNone, R::kKey, &AppServer::TokenizerInfo},
      {"/model_info", "GET", R::kNone, R::kKey, &AppServer::ModelInfo},
      {"/get_model_info", "GET", R::kNone, R::kKey, &AppServer::ModelInfo},
      {"/server_info", "GET", R::kNone, R::kKey, &AppServer::ServerInfo, WorkLane::kControl},
      {"/get_server_info", "GET", R::kNone, R::kKey, &AppServer::ServerInfo, WorkLane::kControl},
      {"/v1/loads", "GET", R::kNone, R::kKey, &AppServer::Loads, WorkLane::kControl},
      {"/get_load", "GET", R::kNone, R::kKey, &AppServer::Loads, WorkLane::kControl},
      {"/metrics", "GET", R::kNone, R::kKey, &AppServer::Metrics, WorkLane::kControl},
      {"/", "GET", R::kNone, R::kOpen, &AppServer::Page},
      {"/live", "GET", R::kNone, R::kKey, &AppServer::Live},
      {"/health", "GET", R::kNone, R::kOpen, &AppServer::Health},
      {"/health_generate", "GET", R::kNone, R::kKey, &AppServer::HealthGenerate},
      {"/flush_cache", "GET, POST", R::kNone, R::kAdmin, &AppServer::FlushCache, WorkLane::kControl},
      {"/hicache/storage-backend", "GET, PUT, DELETE", R::kNone, R::kAdmin, &AppServer::Storage,
       WorkLane::kControl},
      {"/hicache/storage-backend/clear", "POST", R::kNone, R::kAdmin, &AppServer::ClearStorage,
       WorkLane::kControl},
      {"/abort_request", "POST", R::kJson, R::kKey, &AppServer::AbortRequests},
  };
  return kRoutes;
}

const AppServer::Route* AppServer::FindRoute(std::string_view path) {
  if (path.starts_with("/v1/models/")) path = "/v1/models";
  for (const Route& route : Routes()) {
    if (route.path == path) return &route;
  }
  return nullptr;
}

AppServer::AppServer(AppServerOptions options, Engine* engine, std::shared_ptr<const Tokenizer> tokenizer,
                     std::shared_ptr<const ChatTemplate> chat_template, const Clock* clock)
    : options_(std::move(options)),
      engine_(engine),
      tokenizer_(std::move(tokenizer)),
      chat_template_(std::move(chat_template)),
      constraints_(
          std::make_unique<ConstraintCompiler>(tokenizer_, options_.stop_tokens, options_.mask_threads)),
      clock_(clock),
      key_(options_.api_key),
      admin_key_(options_.admin_api_key.empty() ? options_.api_key : options_.admin_api_key),
      started_unix_s_(std::time(nullptr)),
      metrics_(options_.model_name, options_.sglang_metrics),
      pool_(std::make_unique<WorkPool>(options_.pool)) {
  context_ = {.engine = engine_,
              .tokenizer = tokenizer_,
              .metrics = &metrics_,
              .running = &running_,
              .pool = pool_.get(),
              .clock = clock_,
              .ping_interval_s = options_.ping_interval_s};
  if (options_.page) {
    live_ = std::make_unique<LiveFeed>(LiveFeedOptions(), engine_, &metrics_, options_.model_name);
  }
}

StatusOr<std::unique_ptr<AppServer>> AppServer::Start(AppServerOptions options, Engine* engine,
                                                      std::shared_ptr<const Tokenizer> tokenizer,
                                                      std::shared_ptr<const ChatTemplate> chat_template,
                                                      const Clock* clock) {
  std::unique_ptr<AppServer> server(
      new AppServer(std::move(options), engine, std::move(tokenizer), std::move(chat_template), clock));
  ASSIGN_OR_RETURN(server->http_, HttpServer::Start(server->options_.http, server.get()));
  return server;
}

AppServer::~AppServer() { Stop(0); }

void AppServer::Stop(double grace_s) {
  draining_ = true;
  if (live_) live_->Stop();  // its streams would keep the connections open
  if (http_) http_->Stop(grace_s);
  pool_->Stop();
}

HttpResponse AppServer::Refusal(const ApiError& error) const {
  return sluice::ErrorResponse(error, context_.retry_after_s);
}

HttpResponse AppServer::Unauthorized() const {
  return Refusal({.http_status = 401,
                  .message = "a valid API key is needed: send the header Authorization: Bearer KEY",
                  .type = "authentication_error",
                  .code = "invalid_api_key"});
}

HttpResponse AppServer::ErrorResponse(HttpError error, std::string_view detail) {
  const std::string text(detail);
  switch (error) {
    case HttpError::kUnknownCoding:
    case HttpError::kMalformed:
    case HttpError::kHeadTooLarge:
      // Who cannot be read cannot be known either.
      if (key_.enabled()) return Unauthorized();
      return Refusal({.http_status = error == HttpError::kMalformed       ? 400
                                     : error == HttpError::kUnknownCoding ? 501
                                                                          : 431,
                      .message = text,
                      .code = "bad_request"});
    case HttpError::kBodyTooLarge:
      return Refusal({.http_status = 413, .message = text, .code = "request_too_large"});
    case HttpError::kTimeout:
      return Refusal({.http_status = 408, .message = text, .type = "timeout_error", .code = "timeout"});
    case HttpError::kTooManyConnections:
    case HttpError::kTooManyBodies:
      return Refusal({.http_status = 503, .message = text, .type = "overloaded_error", .code = "overloaded"});
    case HttpError::kNoAnswer:
      break;
  }
  return Refusal({.http_status = 500, .message = text, .type = "internal_error"});
}

std::optional<HttpResponse> AppServer::CheckHead(const HttpRequest& head) {
  // Browsers ask before they send a key along.
  if (auto preflight = options_.origins.Preflight(head)) return preflight;
  std::optional<HttpResponse> refusal = CheckRoute(head);
  // The messages API has an error form of its own, also where the status alone would do.
  if (refusal && head.path.starts_with("/v1/messages")) {
    const auto body = nlohmann::ordered_json::parse(refusal->body, nullptr, /*allow_exceptions=*/false);
    refusal->body = MessagesErrorBody({.http_status = refusal->status, .message = body["error"]["message"]});
  }
  return refusal;
}

// Whether `methods`, as in an Allow header, has the whole word.
bool Lists(std::string_view methods, std::string_view method) {
  while (!methods.empty()) {
    const size_t comma = methods.find(", ");
    if (methods.substr(0, comma) == method) return true;
    methods = comma == methods.npos ? std::string_view() : methods.substr(comma + 2);
  }
  return false;
}

std::optional<HttpResponse> AppServer::CheckRoute(const HttpRequest& head) const {
  const Route* route = FindRoute(head.path);
  const bool admin = route != nullptr && route->access == Route::kAdmin;
  // The key comes first: without it not even the list of routes can be asked.
  if ((route == nullptr || route->access != Route::kOpen) && !(admin ? admin_key_ : key_).Allows(head)) {
    return Unauthorized();
  }
  if (route == nullptr) {
    return Refusal({.http_status = 404,
                    .message = Quoted(head.path) + " is no route of this server" +
                               (head.path == "/v1/responses" ? "; use /v1/chat/completions" : ""),
                    .type = "not_found_error",
                    .code = "not_found"});
  }
  const std::string_view method =
      head.method == "HEAD" ? std::string_view("GET") : std::string_view(head.method);
  if (!Lists(route->methods, method)) {
    HttpResponse response =
        Refusal({.http_status = 405,
                 .message = fmt::format("{} {}: use {}", Quoted(head.method), route->path, route->methods),
                 .code = "method_not_allowed"});
    response.headers.emplace_back("Allow", std::string(route->methods));
    return response;
  }
  if (const std::string_view coding = head.Header("content-encoding");
      !coding.empty() && coding != "identity") {
    return Refusal({.http_status = 415,
                    .message = fmt::format("content-encoding: {} is not read here; send the body as it is",
                                           Quoted(coding)),
                    .code = "unsupported_encoding"});
  }
  // curl -d and many scripts send no JSON content type, which is fine; a page of another site could do so
  // too.
  if (!head.Header("origin").empty() && head.method == "POST" && options_.origins.Foreign(head)) {
    std::string_view type = head.Header("content-type");
    type = type.substr(0, type.find(';'));
    while (type.ends_with(' ')) type.remove_suffix(1);
    std::string lower(type);
    for (char& c : lower) c = c >= 'A' && c <= 'Z' ? char(c + 32) : c;
    if (lower != "application/json" && !(lower.starts_with("application/") && lower.ends_with("+json"))) {
      return Refusal({.message = fmt::format("Content-Type: {} from a page of another site; send "
                                             "application/json and allow the page with --cors-origins",
                                             type.empty() ? "none" : Quoted(type)),
                      .param = "content-type"});
    }
  }
  return std::nullopt;
}

void AppServer::Handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) {
  const Route* route = FindRoute(request.path);
  if (route->body == Route::kNone && route->lane == WorkLane::kShort) {
    (this->*route->handle)(request, exchange);  // answers from memory
    return;
  }
  const bool generates = route->handle == &AppServer::Chat || route->handle == &AppServer::Completions ||
                         route->handle == &AppServer::Generate || route->handle == &AppServer::Messages;
  if (draining_ && generates) {
    metrics_.Finished({.endpoint = "any", .result = RequestResult::kRejected, .reason = "shutting_down"});
    exchange->Respond(Refusal({.http_status = 503,
                               .message = "the server is shutting down; send the request to another one",
                               .type = "service_unavailable",
                               .code = "unavailable"}));
    return;
  }
  const WorkLane lane = request.body.size() >= options_.long_text_bytes ? WorkLane::kLong : route->lane;
  auto shared = std::make_shared<HttpRequest>(std::move(request));
  if (!pool_->Post(lane, [this, route, shared, exchange] { (this->*route->handle)(*shared, exchange); })) {
    metrics_.Finished({.endpoint = "any", .result = RequestResult::kRejected, .reason = "work_queue_full"});
    exchange->Respond(Refusal({.http_status = 503,
                               .message = "too many requests wait to be read; try again later",
                               .type = "overloaded_error",
                               .code = "overloaded"}));
  }
}

}  // namespace sluice
