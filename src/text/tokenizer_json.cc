#include "text/tokenizer_json.h"

#include <cstring>
#include <optional>

#include "simdjson.h"

namespace sluice {
namespace {

using simdjson::dom::array;
using simdjson::dom::element;
using simdjson::dom::object;

constexpr int64_t kMaxTokenId = 1 << 24;  // a table is allocated up to the largest id

std::optional<element> Member(const object& o, const char* key) {
  element value;
  if (o.at_key(key).get(value) != simdjson::SUCCESS || value.is_null()) return std::nullopt;
  return value;
}

StatusOr<bool> BoolOr(const object& o, const char* key, bool fallback) {
  const auto value = Member(o, key);
  if (!value) return fallback;
  bool result;
  if (value->get(result) != simdjson::SUCCESS)
    return Invalid("tokenizer.json: {} must be true or false", key);
  return result;
}

StatusOr<std::string> StringOr(const object& o, const char* key, std::string_view fallback) {
  const auto value = Member(o, key);
  if (!value) return std::string(fallback);
  std::string_view result;
  if (value->get(result) != simdjson::SUCCESS) return Invalid("tokenizer.json: {} must be a string", key);
  return std::string(result);
}

// "" when there is none, which no component is called. (A plain return value: GCC 12 mistakes StatusOr's here
// for uninitialised.)
std::string TypeOf(const object& o) {
  std::string_view type;
  return o.at_key("type").get(type) == simdjson::SUCCESS ? std::string(type) : std::string();
}

StatusOr<object> ObjectAt(const element& e, const char* what) {
  object o;
  if (e.get(o) != simdjson::SUCCESS) return Invalid("tokenizer.json: {} must be an object", what);
  return o;
}

StatusOr<array> ArrayAt(const object& o, const char* key) {
  array a;
  if (o.at_key(key).get(a) != simdjson::SUCCESS) return Invalid("tokenizer.json: {} must be a list", key);
  return a;
}

StatusOr<int32_t> TokenId(const element& e, std::string_view token) {
  int64_t id;
  if (e.get(id) != simdjson::SUCCESS || id < 0 || id >= kMaxTokenId) {
    return Invalid("tokenizer.json: the id of token \"{}\" must be a whole number in [0, {})", token,
                   kMaxTokenId);
  }
  return static_cast<int32_t>(id);
}

// {"String": s} or {"Regex": s}
struct Pattern {
  std::string text;
  bool literal = false;
};
StatusOr<Pattern> ParsePattern(const object& o, const char* owner) {
  const auto value = Member(o, "pattern");
  if (!value) return Invalid("tokenizer.json: {} has no pattern", owner);
  ASSIGN_OR_RETURN(const object p, ObjectAt(*value, "pattern"));
  if (Member(p, "Regex")) {
    ASSIGN_OR_RETURN(std::string text, StringOr(p, "Regex", ""));
    return Pattern{std::move(text), false};
  }
  ASSIGN_OR_RETURN(std::string text, StringOr(p, "String", ""));
  if (text.empty())
    return Invalid("tokenizer.json: the pattern of {} must be {{\"Regex\"}} or {{\"String\"}}, not empty",
                   owner);
  return Pattern{std::move(text), true};
}

Status ParseNormalizer(const element& e, TokenizerSpec* spec) {
  ASSIGN_OR_RETURN(const object o, ObjectAt(e, "normalizer"));
  const std::string type = TypeOf(o);
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const array list, ArrayAt(o, "normalizers"));
    for (const element item : list) RETURN_IF_ERROR(ParseNormalizer(item, spec));
    return OkStatus();
  }
  if (type == "NFC") {
    spec->nfc = true;
    return OkStatus();
  }
  return Unsupported(
      "tokenizer.json: normalizer {} is not supported; supported: none, NFC, Sequence of these", type);
}

Status ParsePreTokenizer(const element& e, TokenizerSpec* spec) {
  ASSIGN_OR_RETURN(const object o, ObjectAt(e, "pre_tokenizer"));
  const std::string type = TypeOf(o);
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const array list, ArrayAt(o, "pretokenizers"));
    for (const element item : list) RETURN_IF_ERROR(ParsePreTokenizer(item, spec));
    return OkStatus();
  }
  if (spec->byte_level.present) {
    return Unsupported(
        "tokenizer.json: pre_tokenizer {} after ByteLevel is not supported; ByteLevel must come last", type);
  }
  if (type == "ByteLevel") {
    spec->byte_level.present = true;
    ASSIGN_OR_RETURN(spec->byte_level.add_prefix_space, BoolOr(o, "add_prefix_space", true));
    ASSIGN_OR_RETURN(spec->byte_level.use_regex, BoolOr(o, "use_regex", true));
    return OkStatus();
  }
  if (type == "Split") {
    ASSIGN_OR_RETURN(Pattern pattern, ParsePattern(o, "Split"));
    ASSIGN_OR_RETURN(const std::string behavior, StringOr(o, "behavior", ""));
    SplitStep step{std::move(pattern.text), pattern.literal, {}};
    if (behavior == "Isolated") {
      step.options.behavior = SplitBehavior::kIsolated;
    } else if (behavior == "Removed") {
      step.options.behavior = SplitBehavior::kRemoved;
    } else if (behavior == "MergedWithPrevious") {
      step.options.behavior = SplitBehavior::kMergedWithPrevious;
    } else if (behavior == "MergedWithNext") {
      step.options.behavior = SplitBehavior::kMergedWithNext;
    } else if (behavior == "Contiguous") {
      step.options.behavior = SplitBehavior::kContiguous;
    } else {
      return Invalid("tokenizer.json: Split behavior {} is unknown", behavior);
    }
    ASSIGN_OR_RETURN(step.options.invert, BoolOr(o, "invert", false));
    spec->splits.push_back(std::move(step));
    return OkStatus();
  }
  if (type == "Digits") {
    ASSIGN_OR_RETURN(const bool individual, BoolOr(o, "individual_digits", false));
    spec->splits.push_back({individual ? R"(\p{N})" : R"(\p{N}+)", false, {}});
    return OkStatus();
  }
  return Unsupported(
      "tokenizer.json: pre_tokenizer {} is not supported; supported: Split, Digits, ByteLevel, Sequence of "
      "these",
      type);
}

// Decoders come as a flat list of steps; only orders that can be streamed exactly are taken.
Status ParseDecoder(const element& e, TokenizerSpec* spec, int* stage) {
  enum Stage { kReplace, kBytes, kFused, kStripped };
  ASSIGN_OR_RETURN(const object o, ObjectAt(e, "decoder"));
  const std::string type = TypeOf(o);
  DecoderSpec& d = spec->decoder;
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const array list, ArrayAt(o, "decoders"));
    for (const element item : list) RETURN_IF_ERROR(ParseDecoder(item, spec, stage));
    return OkStatus();
  }
  if (type == "ByteLevel" && *stage == kReplace && d.replacements.empty()) {
    d.kind = DecoderSpec::Kind::kByteLevel;
    *stage = kFused;
    return OkStatus();
  }
  if (type == "Replace" && *stage == kReplace) {
    ASSIGN_OR_RETURN(Pattern pattern, ParsePattern(o, "Replace"));
    if (!pattern.literal)
      return Unsupported("tokenizer.json: decoder Replace with a Regex is not supported; use String");
    ASSIGN_OR_RETURN(std::string content, StringOr(o, "content", ""));
    d.kind = DecoderSpec::Kind::kByteFallback;
    d.replacements.emplace_back(std::move(pattern.text), std::move(content));
    return OkStatus();
  }
  if (type == "ByteFallback" && *stage == kReplace) {
    d.kind = DecoderSpec::Kind::kByteFallback;
    d.byte_tokens = true;
    *stage = kBytes;
    return OkStatus();
  }
  if (type == "Fuse" && *stage <= kFused) {
    if (*stage == kReplace) d.kind = DecoderSpec::Kind::kByteFallback;
    *stage = kFused;
    return OkStatus();
  }
  if (type == "Strip" && *stage == kFused && d.kind == DecoderSpec::Kind::kByteFallback) {
    int64_t start = 0, stop = 0;
    if (o.at_key("start").get(start) != simdjson::SUCCESS ||
        o.at_key("stop").get(stop) != simdjson::SUCCESS || start < 0) {
      return Invalid("tokenizer.json: decoder Strip needs start and stop, whole numbers >= 0");
    }
    if (stop != 0)
      return Unsupported("tokenizer.json: decoder Strip with stop {} is not supported; only stop 0", stop);
    ASSIGN_OR_RETURN(d.strip_char, StringOr(o, "content", " "));
    d.strip_start = static_cast<int>(std::min<int64_t>(start, 1 << 20));
    *stage = kStripped;
    return OkStatus();
  }
  return Unsupported(
      "tokenizer.json: decoder {} is not supported at its place; supported: ByteLevel, or Replace, "
      "ByteFallback, Fuse, Strip in this "
      "order",
      type);
}

Status ParsePostProcessor(const element& e, TokenizerSpec* spec) {
  ASSIGN_OR_RETURN(const object o, ObjectAt(e, "post_processor"));
  const std::string type = TypeOf(o);
  if (type == "ByteLevel") return OkStatus();  // changes offsets only
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const array list, ArrayAt(o, "processors"));
    for (const element item : list) RETURN_IF_ERROR(ParsePostProcessor(item, spec));
    return OkStatus();
  }
  if (type != "TemplateProcessing") {
    return Unsupported(
        "tokenizer.json: post_processor {} is not supported; supported: ByteLevel, TemplateProcessing", type);
  }
  ASSIGN_OR_RETURN(const array single, ArrayAt(o, "single"));
  for (const element item : single) {
    ASSIGN_OR_RETURN(const object piece, ObjectAt(item, "single"));
    const auto special = Member(piece, "SpecialToken");
    if (!special) break;  // the sequence itself; what follows it ends a training sample, never a prompt
    ASSIGN_OR_RETURN(const object token, ObjectAt(*special, "SpecialToken"));
    ASSIGN_OR_RETURN(std::string id, StringOr(token, "id", ""));
    spec->prefix_tokens.push_back(std::move(id));
  }
  return OkStatus();
}

Status ParseModel(const object& model, TokenizerSpec* spec) {
  ASSIGN_OR_RETURN(const std::string type, StringOr(model, "type", "BPE"));
  if (type != "BPE")
    return Unsupported("tokenizer.json: model type {} is not supported; supported: BPE", type);
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    ASSIGN_OR_RETURN(const std::string affix, StringOr(model, key, ""));
    if (!affix.empty()) return Unsupported("tokenizer.json: model.{} \"{}\" is not supported", key, affix);
  }
  if (const auto dropout = Member(model, "dropout")) {
    double value = 0;
    if (dropout->get(value) != simdjson::SUCCESS || value != 0) {
      return Unsupported("tokenizer.json: model.dropout is for training and not supported; set it to null");
    }
  }
  ASSIGN_OR_RETURN(spec->byte_fallback, BoolOr(model, "byte_fallback", false));
  ASSIGN_OR_RETURN(spec->ignore_merges, BoolOr(model, "ignore_merges", false));
  ASSIGN_OR_RETURN(spec->fuse_unk, BoolOr(model, "fuse_unk", false));
  ASSIGN_OR_RETURN(spec->unk_token, StringOr(model, "unk_token", ""));

  object vocab;
  if (model.at_key("vocab").get(vocab) != simdjson::SUCCESS)
    return Invalid("tokenizer.json: model.vocab must be an object");
  spec->vocab.reserve(vocab.size());
  for (const auto field : vocab) {
    ASSIGN_OR_RETURN(const int32_t id, TokenId(field.value, field.key));
    spec->vocab.emplace_back(std::string(field.key), id);
  }
  ASSIGN_OR_RETURN(const array merges, ArrayAt(model, "merges"));
  spec->merges.reserve(merges.size());
  for (const element merge : merges) {
    std::string_view text;
    if (merge.get(text) == simdjson::SUCCESS) {
      const size_t space = text.find(' ');
      if (space == 0 || space == std::string_view::npos || space + 1 == text.size() ||
          text.find(' ', space + 1) != std::string_view::npos) {
        return Invalid("tokenizer.json: merge \"{}\" must be two tokens with one space between", text);
      }
      spec->merges.emplace_back(std::string(text.substr(0, space)), std::string(text.substr(space + 1)));
      continue;
    }
    array pair;
    std::string_view left, right;
    if (merge.get(pair) != simdjson::SUCCESS || pair.size() != 2 ||
        pair.at(0).get(left) != simdjson::SUCCESS || pair.at(1).get(right) != simdjson::SUCCESS) {
      return Invalid("tokenizer.json: merge {} must be a string or a pair of strings", spec->merges.size());
    }
    spec->merges.emplace_back(std::string(left), std::string(right));
  }
  return OkStatus();
}

Status ParseAddedTokens(const object& root, TokenizerSpec* spec) {
  if (!Member(root, "added_tokens")) return OkStatus();
  ASSIGN_OR_RETURN(const array list, ArrayAt(root, "added_tokens"));
  for (const element item : list) {
    ASSIGN_OR_RETURN(const object o, ObjectAt(item, "added_tokens[]"));
    AddedToken token;
    ASSIGN_OR_RETURN(token.content, StringOr(o, "content", ""));
    element id;
    if (o.at_key("id").get(id) != simdjson::SUCCESS)
      return Invalid("tokenizer.json: added token \"{}\" has no id", token.content);
    ASSIGN_OR_RETURN(token.id, TokenId(id, token.content));
    ASSIGN_OR_RETURN(token.single_word, BoolOr(o, "single_word", false));
    ASSIGN_OR_RETURN(token.lstrip, BoolOr(o, "lstrip", false));
    ASSIGN_OR_RETURN(token.rstrip, BoolOr(o, "rstrip", false));
    ASSIGN_OR_RETURN(token.special, BoolOr(o, "special", false));
    ASSIGN_OR_RETURN(token.normalized, BoolOr(o, "normalized", !token.special));
    spec->added.push_back(std::move(token));
  }
  return OkStatus();
}

}  // namespace

StatusOr<TokenizerSpec> ParseTokenizerJson(std::string_view json) {
  simdjson::dom::parser parser;
  element root_element;
  if (const auto error = parser.parse(json.data(), json.size()).get(root_element)) {
    return Invalid("tokenizer.json: not valid JSON: {}", simdjson::error_message(error));
  }
  ASSIGN_OR_RETURN(const object root, ObjectAt(root_element, "the document"));
  TokenizerSpec spec;
  object model;
  if (root.at_key("model").get(model) != simdjson::SUCCESS)
    return Invalid("tokenizer.json: model must be an object");
  RETURN_IF_ERROR(ParseModel(model, &spec));
  RETURN_IF_ERROR(ParseAddedTokens(root, &spec));
  if (const auto e = Member(root, "normalizer")) RETURN_IF_ERROR(ParseNormalizer(*e, &spec));
  if (const auto e = Member(root, "pre_tokenizer")) RETURN_IF_ERROR(ParsePreTokenizer(*e, &spec));
  if (const auto e = Member(root, "post_processor")) RETURN_IF_ERROR(ParsePostProcessor(*e, &spec));
  const auto decoder = Member(root, "decoder");
  if (!decoder)
    return Unsupported("tokenizer.json: a tokenizer without decoder is not supported; set ByteLevel");
  int stage = 0;
  RETURN_IF_ERROR(ParseDecoder(*decoder, &spec, &stage));
  return spec;
}

StatusOr<TokenizerConfig> ParseTokenizerConfig(std::string_view json) {
  simdjson::dom::parser parser;
  object root;
  if (const auto error = parser.parse(json.data(), json.size()).get(root)) {
    return Invalid("tokenizer_config.json: not a JSON object: {}", simdjson::error_message(error));
  }
  TokenizerConfig config;
  // A token is written as a string or as {"content": ...}.
  const auto name = [](const element& e) -> std::string {
    std::string_view text;
    if (e.get(text) == simdjson::SUCCESS) return std::string(text);
    object o;
    if (e.get(o) == simdjson::SUCCESS && o.at_key("content").get(text) == simdjson::SUCCESS)
      return std::string(text);
    return "";
  };
  const auto take = [&](const element& e) {
    std::string text = name(e);
    if (!text.empty()) config.special_tokens.push_back(std::move(text));
  };
  for (const char* key :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    if (const auto e = Member(root, key)) take(*e);
  }
  if (const auto e = Member(root, "additional_special_tokens")) {
    array list;
    if (e->get(list) == simdjson::SUCCESS) {
      for (const element item : list) take(item);
    }
  }
  if (const auto e = Member(root, "bos_token")) config.bos_token = name(*e);
  bool add_bos = false;
  if (root.at_key("add_bos_token").get(add_bos) == simdjson::SUCCESS) config.add_bos_token = add_bos;
  return config;
}

}  // namespace sluice
