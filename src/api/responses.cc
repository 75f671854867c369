#include "api/responses.h"

#include <algorithm>

#include "api/json_writer.h"
#include "text/utf8.h"

namespace sluice {
namespace {

std::string_view ReasonText(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    default:
      return "abort";
  }
}

void WriteMatched(JsonWriter& w, const Finish& finish) {
  switch (finish.match) {
    case StopMatch::kNone:
      w.Null();
      break;
    case StopMatch::kToken:
      w.Int(finish.matched_token);
      break;
    case StopMatch::kText:
      w.Text(finish.matched_text);
      break;
  }
}

void WriteFinish(JsonWriter& w, const Finish* finish) {
  w.Key("finish_reason");
  if (finish == nullptr) {
    w.Null();
    return;
  }
  const bool calls = finish->tool_calls && finish->reason != FinishReason::kAbort;
  w.Text(calls ? "tool_calls" : ReasonText(finish->reason)).Key("matched_stop");
  WriteMatched(w, *finish);
}

void WriteTiers(JsonWriter& w, const CachedTokens& cached) {
  w.Key("cached_tokens_details").Object();
  w.Key("device").Int(cached.device).Key("host").Int(cached.host).Key("storage").Int(cached.storage).End();
}

void WriteUsage(JsonWriter& w, const Usage& usage) {
  w.Key("usage").Object();
  w.Key("prompt_tokens").Int(usage.prompt).Key("completion_tokens").Int(usage.completion);
  w.Key("total_tokens").Int(usage.prompt + usage.completion);
  w.Key("prompt_tokens_details").Object().Key("cached_tokens").Int(usage.cached.total()).End();
  if (usage.details && usage.drafted > 0) {
    w.Key("completion_tokens_details").Object();
    w.Key("accepted_prediction_tokens").Int(usage.draft_kept);
    w.Key("rejected_prediction_tokens").Int(usage.drafted - usage.draft_kept).End();
  }
  w.End();
  if (usage.details) {
    w.Key("sglext").Object();
    WriteTiers(w, usage.cached);
    w.End();
  }
}

void WriteMeta(JsonWriter& w, const AnswerMeta& meta, std::string_view object) {
  w.Key("id").Text(meta.id).Key("object").Text(object);
  w.Key("created").Int(meta.created).Key("model").Text(meta.model);
}

void WriteBytes(JsonWriter& w, std::string_view bytes) {
  w.Key("bytes").Array();
  for (const char c : bytes) w.Int(static_cast<unsigned char>(c));
  w.End();
}

void WriteChatLogprobs(JsonWriter& w, bool wanted, std::span<const TokenLogprob> tokens) {
  w.Key("logprobs");
  if (!wanted) {
    w.Null();
    return;
  }
  w.Object().Key("content").Array();
  for (const TokenLogprob& t : tokens) {
    w.Object().Key("token").Text(TokenText(t.bytes)).Key("logprob").Logprob(t.logprob);
    WriteBytes(w, t.bytes);
    w.Key("top_logprobs").Array();
    for (const TokenAlternative& top : t.top) {
      w.Object().Key("token").Text(TokenText(top.bytes)).Key("logprob").Logprob(top.logprob);
      WriteBytes(w, top.bytes);
      w.End();
    }
    w.End().End();
  }
  w.End().Key("refusal").Null().End();
}

void WriteCompletionLogprobs(JsonWriter& w, bool wanted, bool with_top,
                             std::span<const TokenLogprob> tokens) {
  w.Key("logprobs");
  if (!wanted) {
    w.Null();
    return;
  }
  w.Object();
  w.Key("text_offset").Array();
  for (const TokenLogprob& t : tokens) w.Int(t.text_offset);
  w.End().Key("token_logprobs").Array();
  for (const TokenLogprob& t : tokens) t.has_logprob ? w.Logprob(t.logprob) : w.Null();
  w.End().Key("tokens").Array();
  for (const TokenLogprob& t : tokens) w.Text(TokenText(t.bytes));
  w.End().Key("top_logprobs");
  if (!with_top) {
    w.Null();
  } else {
    w.Array();
    std::vector<std::string> seen;  // two ids may have one text: the more likely one keeps it
    for (const TokenLogprob& t : tokens) {
      if (!t.has_logprob) {
        w.Null();
        continue;
      }
      w.Object();
      seen.clear();
      const auto add = [&](std::string_view bytes, float logprob) {
        std::string text = TokenText(bytes);
        if (std::find(seen.begin(), seen.end(), text) != seen.end()) return;
        w.Key(text).Logprob(logprob);
        seen.push_back(std::move(text));
      };
      for (const TokenAlternative& top : t.top) add(top.bytes, top.logprob);
      add(t.bytes, t.logprob);
      w.End();
    }
    w.End();
  }
  w.End();
}

void WriteChatDelta(JsonWriter& w, const ChoiceDelta& delta) {
  if (delta.event == nullptr) {
    if (!delta.text.empty() || !delta.logprobs.empty()) w.Key("content").Text(delta.text);
    return;
  }
  const ResponseEvent& event = *delta.event;
  switch (event.kind) {
    case ResponseEvent::Kind::kContent:
      w.Key("content").Text(event.text);
      return;
    case ResponseEvent::Kind::kReasoning:
      w.Key("reasoning_content").Text(event.text);
      return;
    case ResponseEvent::Kind::kToolBegin:
      w.Key("tool_calls").Array().Object().Key("index").Int(event.tool_index).Key("id").Text(event.id);
      w.Key("type").Text("function").Key("function").Object().Key("name").Text(event.text);
      w.Key("arguments").Text("").End().End().End();
      return;
    case ResponseEvent::Kind::kToolArguments:
      w.Key("tool_calls").Array().Object().Key("index").Int(event.tool_index);
      w.Key("function").Object().Key("arguments").Text(event.text).End().End().End();
      return;
    case ResponseEvent::Kind::kToolEnd:
      return;
  }
}

template <typename F>
void Record(std::string* out, F body) {
  *out += "data: ";
  JsonWriter w(out);
  w.Object();
  body(w);
  w.End();
  *out += "\n\n";
}

}  // namespace

std::string TokenText(std::string_view bytes) { return ReplaceInvalidUtf8(bytes); }

int64_t CountCharacters(std::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

void AppendChatRole(const AnswerMeta& meta, int32_t index, const Usage* usage, std::string* out) {
  Record(out, [&](JsonWriter& w) {
    WriteMeta(w, meta, "chat.completion.chunk");
    w.Key("choices").Array().Object().Key("index").Int(index);
    w.Key("delta").Object().Key("role").Text("assistant").Key("content").Text("").End();
    w.Key("logprobs").Null().Key("finish_reason").Null().End().End();
    if (usage != nullptr) WriteUsage(w, *usage);
  });
}

void AppendChatDelta(const AnswerMeta& meta, const ChoiceDelta& delta, std::string* out) {
  Record(out, [&](JsonWriter& w) {
    WriteMeta(w, meta, "chat.completion.chunk");
    w.Key("choices").Array().Object().Key("index").Int(delta.index);
    w.Key("delta").Object();
    WriteChatDelta(w, delta);
    w.End();
    WriteChatLogprobs(w, delta.with_logprobs && !delta.logprobs.empty(), delta.logprobs);
    WriteFinish(w, delta.finish);
    w.End().End();
    if (delta.usage != nullptr) WriteUsage(w, *delta.usage);
  });
}

void AppendCompletionDelta(const AnswerMeta& meta, const ChoiceDelta& delta, bool with_top,
                           std::string* out) {
  Record(out, [&](JsonWriter& w) {
    WriteMeta(w, meta, "text_completion");
    w.Key("choices").Array().Object().Key("index").Int(delta.index).Key("text").Text(delta.text);
    WriteCompletionLogprobs(w, delta.with_logprobs && !delta.logprobs.empty(), with_top, delta.logprobs);
    WriteFinish(w, delta.finish);
    w.End().End();
    if (delta.usage != nullptr) WriteUsage(w, *delta.usage);
  });
}

void AppendUsageRecord(const AnswerMeta& meta, bool chat, const Usage& usage, std::string* out) {
  Record(out, [&](JsonWriter& w) {
    WriteMeta(w, meta, chat ? "chat.completion.chunk" : "text_completion");
    w.Key("choices").Array().End();
    WriteUsage(w, usage);
  });
}

void AppendErrorRecord(const ApiError& error, std::string* out) {
  *out += "data: ";
  *out += ErrorBody(error);
  *out += "\n\n";
}

std::string ChatBody(const AnswerMeta& meta, std::span<const ChoiceAnswer> choices, const Usage& usage) {
  std::string out;
  JsonWriter w(&out);
  w.Object();
  WriteMeta(w, meta, "chat.completion");
  w.Key("choices").Array();
  for (const ChoiceAnswer& c : choices) {
    w.Object().Key("index").Int(c.index);
    w.Key("message").Object().Key("role").Text("assistant").Key("content");
    c.text.empty() && !c.tool_calls.empty() ? w.Null() : w.Text(c.text);
    if (!c.reasoning.empty()) w.Key("reasoning_content").Text(c.reasoning);
    if (!c.tool_calls.empty()) {
      w.Key("tool_calls").Array();
      for (const ToolCallAnswer& call : c.tool_calls) {
        w.Object().Key("id").Text(call.id).Key("type").Text("function").Key("function").Object();
        w.Key("name").Text(call.name).Key("arguments").Text(call.arguments).End().End();
      }
      w.End();
    }
    w.End();
    WriteChatLogprobs(w, c.with_logprobs, c.logprobs);
    WriteFinish(w, &c.finish);
    w.End();
  }
  w.End();
  WriteUsage(w, usage);
  w.End();
  return out;
}

std::string CompletionBody(const AnswerMeta& meta, std::span<const ChoiceAnswer> choices,
                           const Usage& usage) {
  std::string out;
  JsonWriter w(&out);
  w.Object();
  WriteMeta(w, meta, "text_completion");
  w.Key("choices").Array();
  for (const ChoiceAnswer& c : choices) {
    w.Object().Key("index").Int(c.index).Key("text").Text(c.text);
    WriteCompletionLogprobs(w, c.with_logprobs, c.with_top, c.logprobs);
    WriteFinish(w, &c.finish);
    w.End();
  }
  w.End();
  WriteUsage(w, usage);
  w.End();
  return out;
}

void AppendNativeAnswer(const NativeAnswer& a, std::string* json) {
  JsonWriter w(json);
  w.Object();
  if (a.with_index) w.Key("index").Int(a.index);
  w.Key("text").Text(a.text);
  w.Key("output_ids").Array();
  for (const int32_t id : a.output_ids) w.Int(id);
  w.End();
  w.Key("meta_info").Object().Key("id").Text(a.id).Key("finish_reason");
  if (a.finish == nullptr) {
    w.Null();
  } else {
    w.Object().Key("type").Text(ReasonText(a.finish->reason));
    if (a.finish->reason == FinishReason::kStop) {
      w.Key("matched");
      WriteMatched(w, *a.finish);
    } else if (a.finish->reason == FinishReason::kLength) {
      w.Key("length").Int(a.usage.completion);
    } else {
      w.Key("message").Text(a.finish->abort_message);
    }
    w.End();
  }
  w.Key("prompt_tokens").Int(a.usage.prompt).Key("completion_tokens").Int(a.usage.completion);
  w.Key("cached_tokens").Int(a.usage.cached.total());
  if (a.usage.details) WriteTiers(w, a.usage.cached);
  w.Key("weight_version").Text("default");
  if (a.e2e_latency_s >= 0) w.Key("e2e_latency").Num(a.e2e_latency_s);
  if (a.spec_steps > 0) {
    w.Key("spec_verify_ct").Int(a.spec_steps);
    w.Key("spec_accept_length").Num(1.0 + double(a.spec_accepted) / a.spec_steps);
    w.Key("spec_accept_token_num").Int(a.spec_accepted).Key("spec_draft_token_num").Int(a.spec_proposed);
  }
  if (a.with_logprobs) {
    const auto entry = [&](bool has, float logprob, int32_t id, std::string_view bytes) {
      w.Array();
      has ? w.Logprob(logprob) : w.Null();
      w.Int(id);
      a.text_in_logprobs ? w.Text(TokenText(bytes)) : w.Null();
      w.End();
    };
    const auto list = [&](std::string_view name, std::span<const TokenLogprob> tokens) {
      w.Key(name).Array();
      for (const TokenLogprob& t : tokens) entry(t.has_logprob, t.logprob, t.id, t.bytes);
      w.End();
    };
    const auto top_list = [&](std::string_view name, std::span<const TokenLogprob> tokens) {
      w.Key(name).Array();
      for (const TokenLogprob& t : tokens) {
        if (!t.has_logprob) {
          w.Null();
          continue;
        }
        w.Array();
        for (const TokenAlternative& top : t.top) entry(true, top.logprob, top.id, top.bytes);
        w.End();
      }
      w.End();
    };
    if (a.with_input_logprobs) list("input_token_logprobs", a.input_logprobs);
    list("output_token_logprobs", a.output_logprobs);
    if (a.with_top) {
      if (a.with_input_logprobs) top_list("input_top_logprobs", a.input_logprobs);
      top_list("output_top_logprobs", a.output_logprobs);
    }
  }
  w.End().End();
}

}  // namespace sluice
