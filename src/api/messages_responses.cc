#include "api/messages_responses.h"

#include "api/json_writer.h"

namespace sluice {
namespace {

template <typename F>
void Record(std::string_view name, std::string* out, F body) {
  *out += "event: ";
  *out += name;
  *out += "\ndata: ";
  JsonWriter w(out);
  w.Object().Key("type").Text(name);
  body(w);
  w.End();
  *out += "\n\n";
}

std::string_view StopReason(const Finish& finish) {
  if (finish.reason == FinishReason::kAbort) return "refusal";
  if (finish.tool_calls) return "tool_use";
  if (finish.reason == FinishReason::kLength) return "max_tokens";
  return finish.match == StopMatch::kText ? "stop_sequence" : "end_turn";
}

void WriteStop(JsonWriter& w, const Finish& finish) {
  w.Key("stop_reason").Text(StopReason(finish)).Key("stop_sequence");
  finish.match == StopMatch::kText && !finish.tool_calls ? w.Text(finish.matched_text) : w.Null();
}

// Tokens that came from the cache are not counted as input tokens there.
void WriteUsage(JsonWriter& w, const Usage& usage) {
  w.Key("usage").Object().Key("input_tokens").Int(usage.prompt - usage.cached.total());
  w.Key("cache_creation_input_tokens").Int(0);
  w.Key("cache_read_input_tokens").Int(usage.cached.total());
  w.Key("output_tokens").Int(usage.completion).End();
}

void WriteHead(JsonWriter& w, const AnswerMeta& meta) {
  w.Key("id").Text(meta.id).Key("type").Text("message").Key("role").Text("assistant");
  w.Key("model").Text(meta.model);
}

std::string_view ErrorType(const ApiError& error) {
  switch (error.http_status) {
    case 400:
      return "invalid_request_error";
    case 401:
      return "authentication_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 503:
      return "overloaded_error";
    case 504:
      return "timeout_error";
    default:
      return error.http_status < 500 ? "invalid_request_error" : "api_error";
  }
}

}  // namespace

void MessagesStream::Start(const AnswerMeta& meta, const Usage& usage, std::string* out) {
  Record("message_start", out, [&](JsonWriter& w) {
    w.Key("message").Object();
    WriteHead(w, meta);
    w.Key("content").Array().End().Key("stop_reason").Null().Key("stop_sequence").Null();
    WriteUsage(w, usage);
    w.End();
  });
}

void MessagesStream::Open(Block block, const ResponseEvent* tool, std::string* out) {
  if (open_ == block && block != Block::kTool) return;
  Close(out);
  open_ = block;
  ++index_;
  Record("content_block_start", out, [&](JsonWriter& w) {
    w.Key("index").Int(index_).Key("content_block").Object();
    switch (block) {
      case Block::kText:
        w.Key("type").Text("text").Key("text").Text("");
        break;
      case Block::kThinking:
        w.Key("type").Text("thinking").Key("thinking").Text("").Key("signature").Text("");
        break;
      default:
        w.Key("type").Text("tool_use").Key("id").Text(tool->id).Key("name").Text(tool->text);
        w.Key("input").Object().End();
    }
    w.End();
  });
}

void MessagesStream::Close(std::string* out) {
  if (open_ == Block::kNone) return;
  open_ = Block::kNone;
  Record("content_block_stop", out, [&](JsonWriter& w) { w.Key("index").Int(index_); });
}

void MessagesStream::Event(const ResponseEvent& event, std::string* out) {
  const auto delta = [&](std::string_view type, std::string_view key) {
    Record("content_block_delta", out, [&](JsonWriter& w) {
      w.Key("index").Int(index_).Key("delta").Object().Key("type").Text(type).Key(key).Text(event.text).End();
    });
  };
  switch (event.kind) {
    case ResponseEvent::Kind::kContent:
      Open(Block::kText, nullptr, out);
      return delta("text_delta", "text");
    case ResponseEvent::Kind::kReasoning:
      Open(Block::kThinking, nullptr, out);
      return delta("thinking_delta", "thinking");
    case ResponseEvent::Kind::kToolBegin:
      return Open(Block::kTool, &event, out);
    case ResponseEvent::Kind::kToolArguments:
      return delta("input_json_delta", "partial_json");
    case ResponseEvent::Kind::kToolEnd:
      return Close(out);
  }
}

void MessagesStream::End(const Finish& finish, const Usage& usage, std::string* out) {
  Close(out);
  Record("message_delta", out, [&](JsonWriter& w) {
    w.Key("delta").Object();
    WriteStop(w, finish);
    w.End();
    WriteUsage(w, usage);
  });
  Record("message_stop", out, [](JsonWriter&) {});
}

std::string MessageBody(const AnswerMeta& meta, const ChoiceAnswer& answer, const Usage& usage) {
  std::string out;
  JsonWriter w(&out);
  w.Object();
  WriteHead(w, meta);
  w.Key("content").Array();
  if (!answer.reasoning.empty()) {
    w.Object().Key("type").Text("thinking").Key("thinking").Text(answer.reasoning);
    w.Key("signature").Text("").End();
  }
  if (!answer.text.empty()) w.Object().Key("type").Text("text").Key("text").Text(answer.text).End();
  for (const ToolCallAnswer& call : answer.tool_calls) {
    w.Object().Key("type").Text("tool_use").Key("id").Text(call.id).Key("name").Text(call.name);
    w.Key("input").Raw(call.arguments).End();
  }
  w.End();
  WriteStop(w, answer.finish);
  WriteUsage(w, usage);
  w.End();
  return out;
}

std::string MessagesErrorBody(const ApiError& error) {
  std::string out;
  JsonWriter w(&out);
  w.Object().Key("type").Text("error").Key("error").Object();
  w.Key("type").Text(ErrorType(error)).Key("message").Text(error.message).End().End();
  return out;
}

void AppendMessagesErrorRecord(const ApiError& error, std::string* out) {
  *out += "event: error\ndata: ";
  *out += MessagesErrorBody(error);
  *out += "\n\n";
}

std::string TokenCountBody(int64_t input_tokens) {
  std::string out;
  JsonWriter w(&out);
  w.Object().Key("input_tokens").Int(input_tokens).End();
  return out;
}

}  // namespace sluice
