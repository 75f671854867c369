#include "http/connection.h"

#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/experimental/awaitable_operators.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <chrono>
#include <ctime>

#include "fmt/format.h"

namespace sluice::http_internal {

namespace asio = boost::asio;
namespace beast = boost::beast;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

namespace {

constexpr auto kTuple = asio::as_tuple(asio::use_awaitable);
// Bytes that every answer begins with. Sent one by one to a client that has closed its sending half: a client
// that has closed the whole socket answers them with a reset, one that waits sees the beginning of its
// answer.
constexpr std::string_view kProbe = "HTTP/1.1 ";
constexpr size_t kPipelineBytesMax = 64 << 10;
constexpr size_t kDirectBytesMax = 16 << 10;  // more is the coroutine's work, which waits for slow readers

Clock::duration Seconds(double s) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
}

HttpRequest ToRequest(const beast::http::request_header<>& head) {
  HttpRequest request;
  request.method = std::string(head.method_string());
  std::string target(head.target());
  if (const size_t scheme = target.find("://"); !target.starts_with('/') && scheme != target.npos) {
    const size_t slash = target.find('/', scheme + 3);
    target = slash == target.npos ? "/" : target.substr(slash);
  }
  const size_t question = target.find('?');
  request.path = target.substr(0, question);
  if (question != target.npos) request.query = target.substr(question + 1);
  for (const auto& field : head) {
    std::string name(field.name_string());
    std::transform(name.begin(), name.end(), name.begin(),
                   [](unsigned char c) { return c >= 'A' && c <= 'Z' ? char(c + 32) : char(c); });
    request.headers.emplace_back(std::move(name), std::string(field.value()));
  }
  return request;
}

// What leaves in doubt where the request ends, or for whom it is: a proxy in front might read it otherwise,
// so nothing after it is read (RFC 9112, 6.1 and 3.2).
std::optional<std::pair<HttpError, std::string>> RefusedFraming(const HttpRequest& request, bool http10) {
  int64_t hosts = 0, codings = 0, lengths = 0;
  for (const auto& [name, value] : request.headers) {
    hosts += name == "host";
    lengths += name == "content-length";
    if (name != "transfer-encoding") continue;
    if (++codings > 1 || !beast::iequals(value, "chunked"))
      return std::pair(HttpError::kUnknownCoding,
                       fmt::format("transfer-encoding: only chunked is known here, "
                                   "once and alone; send a Content-Length or chunked"));
  }
  if (codings > 0 && (lengths > 0 || http10))
    return std::pair(
        HttpError::kMalformed,
        std::string("transfer-encoding: not together with content-length or HTTP/1.0; send one"));
  if (hosts > 1 || (hosts == 0 && !http10))
    return std::pair(HttpError::kMalformed, std::string("host: HTTP/1.1 needs this header exactly once"));
  return std::nullopt;
}

class ExchangeHandle final : public HttpExchange {
 public:
  explicit ExchangeHandle(std::shared_ptr<ExchangeCore> core) : core_(std::move(core)) {}
  ~ExchangeHandle() override { core_->Abandon(); }
  void Respond(HttpResponse response) override { core_->Respond(std::move(response)); }
  void StartStream(StreamHead head) override { core_->StartStream(std::move(head)); }
  bool Write(std::string_view bytes) override { return core_->Write(bytes); }
  void EndStream() override { core_->EndStream(); }
  void OnGone(std::function<void(GoneReason)> callback) override { core_->OnGone(std::move(callback)); }
  bool gone() const override { return core_->gone(); }
  void Post(std::function<void()> fn) override { core_->io->Post(std::move(fn)); }

 private:
  std::shared_ptr<ExchangeCore> core_;
};

}  // namespace

std::string HttpDate() {
  thread_local time_t cached_second = 0;
  thread_local std::string cached;
  const time_t now = std::time(nullptr);
  if (now != cached_second) {
    cached_second = now;
    std::tm tm{};
    gmtime_r(&now, &tm);
    static constexpr const char* kDays[] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
    static constexpr const char* kMonths[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                              "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
    cached = fmt::format("{}, {:02} {} {} {:02}:{:02}:{:02} GMT", kDays[tm.tm_wday], tm.tm_mday,
                         kMonths[tm.tm_mon], tm.tm_year + 1900, tm.tm_hour, tm.tm_min, tm.tm_sec);
  }
  return cached;
}

std::string Serialise(const HttpResponse& response, bool keep_alive, bool head_only) {
  std::string out = fmt::format("HTTP/1.1 {} {}\r\nServer: sluice\r\nDate: {}\r\n", response.status,
                                ReasonPhrase(response.status), HttpDate());
  if (response.status != 204) {
    fmt::format_to(std::back_inserter(out), "Content-Type: {}\r\nContent-Length: {}\r\n",
                   response.content_type, response.body.size());
  }
  for (const auto& [name, value] : response.headers)
    fmt::format_to(std::back_inserter(out), "{}: {}\r\n", name, value);
  out += keep_alive ? "\r\n" : "Connection: close\r\n\r\n";
  if (!head_only && response.status != 204) out += response.body;
  return out;
}

// ---- IoThread ----

void IoThread::Post(std::function<void()> fn) {
  if (stopped) return;
  std::lock_guard lock(inbox_mutex_);
  inbox_.push_back(std::move(fn));
  if (inbox_.size() == 1) asio::post(context, [this] { RunInbox(); });
}

void IoThread::RunInbox() {
  {
    std::lock_guard lock(inbox_mutex_);
    running_.swap(inbox_);
  }
  for (std::function<void()>& fn : running_) fn();
  running_.clear();
}

// ---- ExchangeCore ----

ExchangeCore::ExchangeCore(std::shared_ptr<IoThread> io_thread, std::shared_ptr<ServerShared> shared,
                           std::weak_ptr<Connection> connection, bool http10, bool head_only, bool keep_alive,
                           HttpHeaders extra_headers)
    : io(std::move(io_thread)),
      wake(io->context),
      shared_(std::move(shared)),
      connection_(std::move(connection)),
      http10_(http10),
      head_only_(head_only),
      extra_headers_(std::move(extra_headers)),
      keep_alive_(keep_alive) {}

void ExchangeCore::WakeLocked() {
  if (wake_posted_ || io->stopped) return;
  wake_posted_ = true;
  asio::post(io->context, [self = shared_from_this()] {
    {
      std::lock_guard lock(self->mutex_);
      self->wake_posted_ = false;
    }
    self->wake.cancel();
  });
}

void ExchangeCore::Respond(HttpResponse response) {
  std::lock_guard lock(mutex_);
  if (started_ || gone_) return;
  started_ = ended_ = true;
  keep_alive_ = keep_alive_ && !response.close && !shared_->stopping;
  response.headers.insert(response.headers.end(), extra_headers_.begin(), extra_headers_.end());
  pending_ = Serialise(response, keep_alive_, head_only_);
  WakeLocked();
}

void ExchangeCore::StartStream(StreamHead head) {
  std::lock_guard lock(mutex_);
  if (started_ || gone_) return;
  started_ = streaming_ = true;
  keep_alive_ = keep_alive_ && !http10_ && !shared_->stopping;
  pending_ = fmt::format("HTTP/1.1 {} {}\r\nServer: sluice\r\nDate: {}\r\nContent-Type: {}\r\n", head.status,
                         ReasonPhrase(head.status), HttpDate(), head.content_type);
  for (const HttpHeaders* headers : {&std::as_const(head.headers), &extra_headers_}) {
    for (const auto& [name, value] : *headers)
      fmt::format_to(std::back_inserter(pending_), "{}: {}\r\n", name, value);
  }
  if (!http10_) pending_ += "Transfer-Encoding: chunked\r\n";
  pending_ += keep_alive_ ? "\r\n" : "Connection: close\r\n\r\n";
  filler_ = std::move(head.idle_filler);
  filler_interval_s_ = head.idle_interval_s;
  WakeLocked();
}

void ExchangeCore::AppendFramedLocked(std::string_view bytes) {
  if (head_only_ || bytes.empty()) return;
  if (http10_) {
    pending_ += bytes;
    return;
  }
  fmt::format_to(std::back_inserter(pending_), "{:x}\r\n", bytes.size());
  pending_ += bytes;
  pending_ += "\r\n";
}

bool ExchangeCore::Write(std::string_view bytes) {
  std::lock_guard lock(mutex_);
  if (gone_ || ended_ || !streaming_) return false;
  if (pending_.size() + in_flight_ + bytes.size() > shared_->options.max_output_bytes) {
    cut_ = true;
    asio::post(io->context, [weak = connection_, self = shared_from_this()] {
      self->MarkGone(GoneReason::kSlowReader);
      if (auto connection = weak.lock()) connection->Close(GoneReason::kSlowReader);
    });
    return false;
  }
  AppendFramedLocked(bytes);
  if (direct_ && pending_.size() <= kDirectBytesMax && io->context.get_executor().running_in_this_thread()) {
    SendPendingLocked();
    if (pending_.empty()) return true;
  }
  WakeLocked();
  return true;
}

// Saves a turn of the connection's coroutine and its timers, which cost more than the send itself. Errors and
// what does not fit are left to the coroutine.
void ExchangeCore::SendPendingLocked() {
  const auto connection = connection_.lock();
  if (connection == nullptr) return;
  const size_t sent = connection->SendNow(pending_);
  wrote_directly_ = wrote_directly_ || sent > 0;
  if (sent == pending_.size()) {
    pending_.clear();
  } else {
    pending_.erase(0, sent);
    direct_ = false;
  }
}

bool ExchangeCore::WroteDirectly() {
  std::lock_guard lock(mutex_);
  return std::exchange(wrote_directly_, false);
}

void ExchangeCore::EndStream() {
  std::lock_guard lock(mutex_);
  if (gone_ || ended_ || !streaming_) return;
  ended_ = true;
  if (!http10_ && !head_only_) pending_ += "0\r\n\r\n";
  WakeLocked();
}

void ExchangeCore::OnGone(std::function<void(GoneReason)> callback) {
  {
    std::lock_guard lock(mutex_);
    if (!gone_) {
      on_gone_ = std::move(callback);
      return;
    }
  }
  callback(reason_);
}

bool ExchangeCore::gone() const {
  std::lock_guard lock(mutex_);
  return gone_;
}

void ExchangeCore::Abandon() {
  bool unanswered;
  {
    std::lock_guard lock(mutex_);
    on_gone_ = nullptr;
    if (gone_ || ended_) return;
    unanswered = !started_;
    if (!unanswered) {
      cut_ = true;
      keep_alive_ = false;
      WakeLocked();
    }
  }
  if (unanswered) Respond(shared_->handler->ErrorResponse(HttpError::kNoAnswer, "the request was dropped"));
}

ExchangeCore::Chunk ExchangeCore::Take(bool direct) {
  std::lock_guard lock(mutex_);
  Chunk chunk;
  chunk.bytes.swap(pending_);
  in_flight_ = chunk.bytes.size();
  chunk.ended = ended_;
  chunk.cut = cut_;
  chunk.probe = std::exchange(probe_, false);
  direct_ = direct && chunk.bytes.empty() && !chunk.ended && !chunk.cut && !chunk.probe;
  return chunk;
}

void ExchangeCore::Written() {
  std::lock_guard lock(mutex_);
  in_flight_ = 0;
}

void ExchangeCore::MarkGone(GoneReason reason) {
  std::function<void(GoneReason)> callback;
  {
    std::lock_guard lock(mutex_);
    if (gone_) return;
    gone_ = true;
    reason_ = reason;
    pending_.clear();
    pending_.shrink_to_fit();
    callback.swap(on_gone_);
  }
  if (callback) callback(reason);
}

void ExchangeCore::RequestProbe() {
  std::lock_guard lock(mutex_);
  probe_ = true;
  WakeLocked();
}

bool ExchangeCore::streaming() const {
  std::lock_guard lock(mutex_);
  return streaming_;
}

bool ExchangeCore::close_after() const {
  std::lock_guard lock(mutex_);
  return !keep_alive_;
}

std::string ExchangeCore::Filler() const {
  std::lock_guard lock(mutex_);
  if (!streaming_ || filler_.empty() || head_only_) return {};
  return http10_ ? filler_ : fmt::format("{:x}\r\n{}\r\n", filler_.size(), filler_);
}

double ExchangeCore::filler_interval_s() const {
  std::lock_guard lock(mutex_);
  return streaming_ && !filler_.empty() ? filler_interval_s_ : 3600;
}

// ---- Connection ----

Connection::Connection(asio::ip::tcp::socket socket, std::shared_ptr<IoThread> io,
                       std::shared_ptr<ServerShared> shared)
    : stream_(std::move(socket)),
      buffer_(shared->options.max_head_bytes + kPipelineBytesMax),
      io_(std::move(io)),
      shared_(std::move(shared)) {
  shared_->connections.fetch_add(1);
}

Connection::~Connection() {
  io_->connections.erase(this);
  shared_->connections.fetch_sub(1);
}

void Connection::Start() {
  io_->connections.emplace(this, weak_from_this());
  error_code ignored;
  stream_.socket().set_option(asio::ip::tcp::no_delay(true), ignored);
  // A fixed kernel buffer, so that what waits for a slow reader is bounded there too.
  stream_.socket().set_option(asio::socket_base::send_buffer_size(256 << 10), ignored);
  asio::co_spawn(
      io_->context, [self = shared_from_this()] { return self->Run(); }, asio::detached);
}

void Connection::CloseIfIdle() {
  if (current_ == nullptr) Close(GoneReason::kShutdown);
}

void Connection::Close(GoneReason reason) {
  if (current_ != nullptr) current_->MarkGone(reason);
  error_code ignored;
  stream_.socket().close(ignored);
}

asio::awaitable<void> Connection::Run() {
  bool first = true;
  while (co_await ServeOne(first)) first = false;
  error_code ignored;
  stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_both, ignored);
  stream_.socket().close(ignored);
}

size_t Connection::SendNow(std::string_view bytes) {
  const ssize_t n =
      ::send(stream_.socket().native_handle(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return n > 0 ? size_t(n) : 0;
}

asio::awaitable<bool> Connection::WriteAll(std::string_view bytes) {
  timed_out_ = false;
  while (!bytes.empty()) {
    stream_.expires_after(Seconds(shared_->options.write_stall_s));
    auto [ec, n] = co_await stream_.async_write_some(asio::buffer(bytes.data(), bytes.size()), kTuple);
    if (ec) {
      timed_out_ = ec == beast::error::timeout;
      co_return false;
    }
    bytes.remove_prefix(n);
  }
  co_return true;
}

// Answers before the body was read: the rest of it is read and thrown away for a moment, because closing a
// socket with unread bytes resets it and the client would lose the answer.
asio::awaitable<void> Connection::Refuse(HttpResponse response) {
  const std::string bytes = Serialise(response, false, false);
  if (!co_await WriteAll(bytes)) co_return;
  error_code ignored;
  stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  buffer_.consume(buffer_.size());
  if (input_ended_) co_return;
  const auto until = Clock::now() + std::chrono::seconds(3);
  for (size_t drained = 0; drained < (32u << 20) && Clock::now() < until;) {
    stream_.expires_at(until);
    auto [ec, n] = co_await stream_.async_read_some(buffer_.prepare(16 << 10), kTuple);
    if (ec) break;
    drained += n;
  }
}

// Gives the parser what is in the buffer, when no more will come: the head, or the rest.
template <typename Parser>
static error_code ParseRest(beast::flat_buffer* buffer, Parser* parser, bool head) {
  parser->eager(!head);
  while (head ? !parser->is_header_done() : !parser->is_done()) {
    error_code ec;
    const size_t used = parser->put(buffer->data(), ec);
    buffer->consume(used);
    if (ec == beast::http::error::need_more || (!ec && used == 0)) return beast::http::error::partial_message;
    if (ec) return ec;
  }
  return {};
}

asio::awaitable<bool> Connection::ServeOne(bool first) {
  const HttpServerOptions& options = shared_->options;
  if (shared_->stopping) co_return false;
  if (buffer_.size() == 0) {  // wait for the first byte: an idle client is closed without a word
    if (input_ended_) co_return false;
    stream_.expires_after(Seconds(first ? options.head_timeout_s : options.idle_timeout_s));
    auto [ec, n] = co_await stream_.async_read_some(buffer_.prepare(4096), kTuple);
    if (ec) co_return false;
    buffer_.commit(n);
  }
  // An empty line before a request is skipped (RFC 9112, 2.2).
  for (int blank = 0; blank < 2 && buffer_.size() > 0; ++blank) {
    const char c = *static_cast<const char*>(buffer_.data().data());
    if (c != '\r' && c != '\n') break;
    buffer_.consume(1);
  }
  beast::http::request_parser<beast::http::string_body> parser;
  parser.header_limit(options.max_head_bytes);
  parser.body_limit(boost::none);  // checked below, after the handler has seen the head
  stream_.expires_after(Seconds(options.head_timeout_s));
  {
    error_code ec;
    if (input_ended_) {
      ec = ParseRest(&buffer_, &parser, true);
    } else {
      ec = std::get<0>(co_await beast::http::async_read_header(stream_, buffer_, parser, kTuple));
    }
    if (ec) {
      if (ec == beast::http::error::header_limit || ec == beast::http::error::buffer_overflow) {
        co_await Refuse(shared_->handler->ErrorResponse(
            HttpError::kHeadTooLarge, fmt::format("request head over {} bytes", options.max_head_bytes)));
      } else if (ec == beast::error::timeout) {
        // The stream closes itself on a timeout; there is nobody to answer.
      } else if (ec.category() == beast::http::make_error_code(beast::http::error::bad_value).category() &&
                 ec != beast::http::error::end_of_stream && ec != beast::http::error::partial_message) {
        co_await Refuse(shared_->handler->ErrorResponse(HttpError::kMalformed, ec.message()));
      }
      co_return false;
    }
  }
  HttpRequest request = ToRequest(parser.get());
  if (auto refused = RefusedFraming(request, parser.get().version() < 11)) {
    co_await Refuse(shared_->handler->ErrorResponse(refused->first, refused->second));
    co_return false;
  }
  HttpHeaders extra = shared_->handler->AnswerHeaders(request);
  const auto with_extra = [&extra](HttpResponse response) {
    response.headers.insert(response.headers.end(), extra.begin(), extra.end());
    return response;
  };
  if (auto refusal = shared_->handler->CheckHead(request)) {
    *refusal = with_extra(std::move(*refusal));
    if (parser.is_done() && parser.keep_alive() && !refusal->close &&
        !shared_->stopping) {  // no body: nothing is lost
      const std::string bytes = Serialise(*refusal, true, request.method == "HEAD");
      co_return co_await WriteAll(bytes);
    }
    co_await Refuse(std::move(*refusal));
    co_return false;
  }
  const std::string too_large =
      fmt::format("request body over {} bytes (--max-body-bytes)", options.max_body_bytes);
  if (auto length = parser.content_length(); length && *length > options.max_body_bytes) {
    co_await Refuse(with_extra(shared_->handler->ErrorResponse(HttpError::kBodyTooLarge, too_large)));
    co_return false;
  }
  parser.body_limit(options.max_body_bytes);
  auto charge = std::make_shared<BodyCharge>(shared_);
  const std::string too_many = "the requests being read take too much memory; try again later";
  if (!charge->RaiseTo(parser.content_length().value_or(0))) {
    co_await Refuse(with_extra(shared_->handler->ErrorResponse(HttpError::kTooManyBodies, too_many)));
    co_return false;
  }
  if (request.Header("expect") == "100-continue" && !parser.is_done() && buffer_.size() == 0) {
    if (!co_await WriteAll("HTTP/1.1 100 Continue\r\n\r\n")) co_return false;
  }
  while (!parser.is_done()) {
    stream_.expires_after(Seconds(options.body_stall_s));
    error_code ec;
    if (input_ended_) {
      ec = ParseRest(&buffer_, &parser, false);
    } else {
      ec = std::get<0>(co_await beast::http::async_read_some(stream_, buffer_, parser, kTuple));
    }
    if (ec == beast::http::error::body_limit) {
      co_await Refuse(with_extra(shared_->handler->ErrorResponse(HttpError::kBodyTooLarge, too_large)));
      co_return false;
    }
    if (ec == beast::http::error::end_of_stream || ec == beast::http::error::partial_message ||
        ec == beast::error::timeout) {
      co_return false;
    }
    if (ec) {
      if (ec.category() == beast::http::make_error_code(beast::http::error::bad_value).category()) {
        co_await Refuse(with_extra(shared_->handler->ErrorResponse(HttpError::kMalformed, ec.message())));
      }
      co_return false;
    }
    if (!charge->RaiseTo(parser.get().body().capacity())) {
      co_await Refuse(with_extra(shared_->handler->ErrorResponse(HttpError::kTooManyBodies, too_many)));
      co_return false;
    }
  }
  request.body = std::move(parser.get().body());
  request.body_charge = std::move(charge);
  const bool http10 = parser.get().version() < 11;
  auto core = std::make_shared<ExchangeCore>(io_, shared_, weak_from_this(), http10, request.method == "HEAD",
                                             parser.keep_alive() && !shared_->stopping, std::move(extra));
  current_ = core;
  shared_->handler->Handle(std::move(request), std::make_shared<ExchangeHandle>(core));

  using namespace asio::experimental::awaitable_operators;
  const auto result = co_await (Pump(core) || Monitor(core));
  const bool whole = result.index() == 0 && std::get<0>(result);
  if (!whole) core->MarkGone(timed_out_ ? GoneReason::kSlowReader : GoneReason::kClosed);
  current_ = nullptr;
  co_return whole && !core->close_after();
}

// Writes what the exchange has until the answer is complete (true), cut or failed (false).
asio::awaitable<bool> Connection::Pump(std::shared_ptr<ExchangeCore> core) {
  co_await asio::this_coro::throw_if_cancelled(false);
  size_t probed = 0;  // bytes of kProbe that went out before the answer
  bool wrote_any = false;
  for (;;) {
    if ((co_await asio::this_coro::cancellation_state).cancelled() != asio::cancellation_type::none)
      co_return false;
    ExchangeCore::Chunk chunk = core->Take(wrote_any);
    std::string_view out = chunk.bytes;
    if (!out.empty()) {
      if (!wrote_any) out.remove_prefix(probed);
      wrote_any = true;
    } else if (chunk.cut) {
      co_return false;
    } else if (chunk.ended) {
      co_return true;
    } else {
      if (chunk.probe) {
        if (wrote_any) {
          chunk.bytes = core->Filler();
        } else if (probed < kProbe.size()) {
          chunk.bytes = kProbe.substr(probed++, 1);
        }
      }
      if (chunk.bytes.empty()) {
        core->wake.expires_after(Seconds(core->filler_interval_s()));
        auto [ec] = co_await core->wake.async_wait(kTuple);
        if (ec || core->WroteDirectly()) continue;  // something to do, cancelled, or not idle after all
        chunk.bytes = core->Filler();
      }
      out = chunk.bytes;
    }
    if (!co_await WriteAll(out)) co_return false;
    core->Written();
  }
}

bool Connection::PeerGone() {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (::getsockopt(stream_.socket().native_handle(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return true;
  return info.tcpi_state == TCP_CLOSE;
}

// Ends when the client is gone. Bytes of a next request are kept for it.
asio::awaitable<void> Connection::Monitor(std::shared_ptr<ExchangeCore> core) {
  co_await asio::this_coro::throw_if_cancelled(false);
  auto& socket = stream_.socket();
  while (!input_ended_ && buffer_.size() < kPipelineBytesMax) {
    auto [ec, n] = co_await socket.async_read_some(buffer_.prepare(4096), kTuple);
    buffer_.commit(n);
    input_ended_ = ec == asio::error::eof;
    if ((co_await asio::this_coro::cancellation_state).cancelled() != asio::cancellation_type::none)
      co_return;
    if (ec && !input_ended_) co_return;
  }
  // A closed sending half says nothing about the other half: probe it, at first at once, then ever more
  // rarely.
  using namespace asio::experimental::awaitable_operators;
  asio::steady_timer timer(io_->context);
  for (auto pause = std::chrono::milliseconds(100);;
       pause = std::min(pause * 2, std::chrono::milliseconds(5000))) {
    if (input_ended_) core->RequestProbe();
    timer.expires_after(pause);
    co_await (socket.async_wait(asio::socket_base::wait_error, kTuple) || timer.async_wait(kTuple));
    if ((co_await asio::this_coro::cancellation_state).cancelled() != asio::cancellation_type::none)
      co_return;
    if (!socket.is_open() || PeerGone()) co_return;
  }
}

}  // namespace sluice::http_internal
