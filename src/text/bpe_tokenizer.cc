#include <algorithm>
#include <array>
#include <bitset>
#include <optional>

#include "base/file_text.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/regex_splitter.h"
#include "text/tokenizer.h"
#include "text/tokenizer_json.h"
#include "text/utf8.h"

namespace sluice {
namespace {

constexpr std::string_view kByteLevelRegex =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

constexpr size_t kLongWord = 64;  // bytes; longer words are worth cutting before merging

// GPT-2's printable stand-ins for bytes: 0x21-0x7E, 0xA1-0xAC and 0xAE-0xFF are themselves, the other bytes,
// in order, are the code points from U+0100 on.
struct ByteAlphabet {
  std::array<char32_t, 256> to_char;
  std::array<int16_t, 0x144> to_byte;
  ByteAlphabet() {
    to_byte.fill(-1);
    char32_t next = 0x100;
    for (int b = 0; b < 256; ++b) {
      const bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      to_char[b] = printable ? static_cast<char32_t>(b) : next++;
      to_byte[to_char[b]] = static_cast<int16_t>(b);
    }
  }
};
const ByteAlphabet kAlphabet;

// nullopt: a character outside the alphabet.
std::optional<std::string> UndoAlphabet(std::string_view token) {
  std::string out;
  for (size_t pos = 0; pos < token.size();) {
    const Utf8Step step = DecodeUtf8(token, pos);
    if (step.kind != Utf8Kind::kValid || step.codepoint >= kAlphabet.to_byte.size()) return std::nullopt;
    const int byte = kAlphabet.to_byte[step.codepoint];
    if (byte < 0) return std::nullopt;
    out.push_back(static_cast<char>(byte));
    pos += step.bytes;
  }
  return out;
}

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

// "<0xNN>" as its byte; -1 for anything else.
int ByteToken(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  const int high = HexDigit(token[3]), low = HexDigit(token[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

std::string ReplaceAll(std::string text, const std::string& from, const std::string& to) {
  for (size_t pos = 0; (pos = text.find(from, pos)) != std::string::npos; pos += to.size())
    text.replace(pos, from.size(), to);
  return text;
}

// The text of all segments with the byte ranges that come from the template.
struct Joined {
  std::string text;
  std::vector<std::pair<size_t, size_t>> template_ranges;  // [begin, end), in order, not adjacent
};

class BpeTokenizer final : public Tokenizer {
 public:
  static StatusOr<std::shared_ptr<const Tokenizer>> Create(TokenizerSpec spec, const TokenizerConfig& config);

  std::vector<int32_t> Encode(std::string_view text, bool allow_special) const override;
  std::vector<int32_t> EncodeSegments(std::span<const PromptSegment> segments) const override;
  std::span<const int32_t> PromptPrefix() const override { return prefix_; }
  std::string_view TokenBytes(int32_t id) const override {
    return id >= 0 && id < vocab_size() ? std::string_view(bytes_[id]) : std::string_view();
  }
  bool IsSpecial(int32_t id) const override { return id >= 0 && id < vocab_size() && special_[id]; }
  int32_t IdOf(std::string_view token) const override {
    if (const auto it = added_ids_.find(token); it != added_ids_.end()) return it->second;
    const auto it = vocab_.find(token);
    return it == vocab_.end() ? -1 : it->second;
  }
  int32_t vocab_size() const override { return static_cast<int32_t>(bytes_.size()); }
  int32_t max_token_bytes() const override { return max_token_bytes_; }
  const DecodeRules& decode_rules() const override { return rules_; }
  std::string Decode(std::span<const int32_t> ids, bool skip_special) const override;

 private:
  std::vector<int32_t> EncodeJoined(Joined joined) const;
  void EncodePiece(std::string_view piece, const std::vector<std::pair<size_t, size_t>>& template_ranges,
                   std::vector<int32_t>* ids) const;
  void EncodePlain(std::string_view text, std::vector<int32_t>* ids) const;
  struct Scratch {
    std::vector<int32_t> symbols;
    std::string prefixed;
    std::vector<int32_t>* ids;
  };
  void SplitAndEncode(std::string_view piece, size_t step, Scratch* scratch) const;
  void EncodeWord(std::string_view word, std::vector<int32_t>* symbols, std::vector<int32_t>* ids) const;
  void AppendUnknown(bool previous_unknown, std::vector<int32_t>* symbols) const;
  std::string DecodedBytes(const std::string& token, const DecoderSpec& decoder) const;

  TokenIds vocab_;
  TokenIds added_ids_;
  TokenIds words_;  // raw bytes of a whole word whose encoding is known to be one token
  static size_t Joint(char left, char right) {
    return static_cast<size_t>(static_cast<unsigned char>(left)) << 8 | static_cast<unsigned char>(right);
  }

  BpeMerges merges_;
  std::bitset<256 * 256> joints_;  // byte-level: the byte pairs that stand at the middle of some merge rule
  bool cuttable_ = false;          // every byte has a symbol
  std::array<int32_t, 256> byte_ids_;      // byte-level: the symbol of each byte; -1: none
  std::array<int32_t, 256> fallback_ids_;  // <0xNN>; -1: none
  int32_t unk_id_ = -1;
  bool fuse_unk_ = false;
  bool byte_fallback_ = false;
  bool nfc_ = false;
  bool byte_level_ = false;
  bool add_prefix_space_ = false;
  std::vector<std::unique_ptr<const RegexSplitter>> splits_;
  std::unique_ptr<const RegexSplitter> byte_level_regex_;
  AddedTokenMatcher raw_matcher_;         // searched in the text as it is
  AddedTokenMatcher normalized_matcher_;  // searched after normalising
  std::vector<std::string> bytes_;
  std::vector<bool> special_;
  std::vector<int32_t> prefix_;
  DecodeRules rules_;
  int32_t max_token_bytes_ = 1;
};

std::string BpeTokenizer::DecodedBytes(const std::string& token, const DecoderSpec& decoder) const {
  if (decoder.kind == DecoderSpec::Kind::kByteLevel) return UndoAlphabet(token).value_or(token);
  std::string text = token;
  for (const auto& [from, to] : decoder.replacements) text = ReplaceAll(std::move(text), from, to);
  if (decoder.byte_tokens) {
    if (const int byte = ByteToken(text); byte >= 0) return std::string(1, static_cast<char>(byte));
  }
  return text;
}

StatusOr<std::shared_ptr<const Tokenizer>> BpeTokenizer::Create(TokenizerSpec spec,
                                                                const TokenizerConfig& config) {
  auto t = std::make_shared<BpeTokenizer>();
  t->fuse_unk_ = spec.fuse_unk;
  t->byte_fallback_ = spec.byte_fallback;
  t->nfc_ = spec.nfc;
  t->byte_level_ = spec.byte_level.present;
  t->add_prefix_space_ = spec.byte_level.add_prefix_space;

  int32_t size = 0;
  t->vocab_.reserve(spec.vocab.size());
  for (auto& [token, id] : spec.vocab) size = std::max(size, id + 1);
  for (const AddedToken& token : spec.added) size = std::max(size, token.id + 1);
  t->bytes_.resize(size);
  t->special_.resize(size);
  for (auto& [token, id] : spec.vocab) {
    if (!t->vocab_.emplace(token, id).second)
      return Invalid("tokenizer.json: token \"{}\" is in the vocabulary twice", token);
    t->bytes_[id] = t->DecodedBytes(token, spec.decoder);
    t->max_token_bytes_ = std::max(t->max_token_bytes_, static_cast<int32_t>(t->bytes_[id].size()));
  }

  for (AddedToken& token : spec.added) {
    if (std::find(config.special_tokens.begin(), config.special_tokens.end(), token.content) !=
        config.special_tokens.end()) {
      token.special = true;
    }
    t->bytes_[token.id] = t->DecodedBytes(token.content, spec.decoder);
    t->special_[token.id] = token.special;
    t->added_ids_.insert_or_assign(token.content, token.id);
    t->max_token_bytes_ = std::max(t->max_token_bytes_, static_cast<int32_t>(token.content.size()));
    if (token.normalized && t->nfc_) token.content = NormalizeNfc(token.content);
    (token.normalized ? t->normalized_matcher_ : t->raw_matcher_).Add(token);
  }

  const auto id_of = [&](const std::string& token) {
    const auto it = t->vocab_.find(token);
    return it == t->vocab_.end() ? -1 : it->second;
  };
  if (!spec.unk_token.empty()) {
    t->unk_id_ = id_of(spec.unk_token);
    if (t->unk_id_ < 0)
      return Invalid("tokenizer.json: unk_token \"{}\" is not in the vocabulary", spec.unk_token);
  }
  for (int b = 0; b < 256; ++b) {
    std::string character;
    AppendUtf8(kAlphabet.to_char[b], &character);
    t->byte_ids_[b] = id_of(character);
    t->fallback_ids_[b] = id_of(fmt::format("<0x{:02X}>", b));
  }
  t->cuttable_ = std::all_of(t->byte_ids_.begin(), t->byte_ids_.end(), [](int32_t id) { return id >= 0; });
  t->merges_.Reserve(spec.merges.size());
  for (size_t rank = 0; rank < spec.merges.size(); ++rank) {
    const auto& [left, right] = spec.merges[rank];
    if (left.empty() || right.empty()) return Invalid("tokenizer.json: merge {} has an empty side", rank);
    const int32_t l = id_of(left), r = id_of(right), merged = id_of(left + right);
    if (l < 0 || r < 0 || merged < 0) {
      return Invalid("tokenizer.json: merge {} (\"{}\" \"{}\") names a token that is not in the vocabulary",
                     rank, left, right);
    }
    t->merges_.Add(l, r, static_cast<uint32_t>(rank), merged);
    const std::optional<std::string> left_bytes = UndoAlphabet(left), right_bytes = UndoAlphabet(right);
    if (left_bytes && right_bytes) t->joints_[Joint(left_bytes->back(), right_bytes->front())] = true;
  }

  for (const SplitStep& step : spec.splits) {
    auto splitter = step.literal ? RegexSplitter::CreateLiteral(step.pattern, step.options)
                                 : RegexSplitter::Create(step.pattern, step.options);
    if (!splitter.ok())
      return Status(splitter.status().code(),
                    fmt::format("tokenizer.json: pre_tokenizer Split: {}", Message(splitter.status())));
    t->splits_.push_back(std::move(splitter).value());
  }
  if (spec.byte_level.use_regex) {
    ASSIGN_OR_RETURN(t->byte_level_regex_, RegexSplitter::Create(kByteLevelRegex, {}));
  }

  // Most words of a text are one token. Those tokens that their own bytes merge to are looked up at once.
  std::vector<int32_t> symbols, ids;
  for (const auto& [token, id] : spec.vocab) {
    std::string raw = token;
    if (t->byte_level_) {
      std::optional<std::string> bytes = UndoAlphabet(token);
      if (!bytes) continue;
      raw = std::move(*bytes);
    }
    if (raw.empty()) continue;
    if (!spec.ignore_merges) {
      ids.clear();
      t->EncodeWord(raw, &symbols, &ids);
      if (ids.size() != 1 || ids[0] != id) continue;
    }
    t->words_.emplace(std::move(raw), id);
  }

  for (const std::string& token : spec.prefix_tokens) {
    const int32_t id = t->IdOf(token);
    if (id < 0) return Invalid("tokenizer.json: post_processor names the unknown token \"{}\"", token);
    t->prefix_.push_back(id);
  }
  if (t->prefix_.empty() && config.add_bos_token) {
    const int32_t id = t->IdOf(config.bos_token);
    if (id < 0)
      return Invalid("tokenizer_config.json: add_bos_token is true but bos_token \"{}\" is no token",
                     config.bos_token);
    t->prefix_.push_back(id);
  }
  t->rules_ = {spec.decoder.byte_tokens, spec.decoder.strip_char, spec.decoder.strip_start};
  return t;
}

void BpeTokenizer::AppendUnknown(bool previous_unknown, std::vector<int32_t>* symbols) const {
  if (unk_id_ < 0 || (fuse_unk_ && previous_unknown))
    return;  // without unk_token the reference drops the character too
  symbols->push_back(unk_id_);
}

void BpeTokenizer::EncodeWord(std::string_view word, std::vector<int32_t>* symbols,
                              std::vector<int32_t>* ids) const {
  if (word.empty()) return;
  if (const auto it = words_.find(word); it != words_.end()) {
    ids->push_back(it->second);
    return;
  }
  symbols->clear();
  bool unknown = false;
  if (byte_level_) {
    symbols->reserve(word.size());
    if (cuttable_ && word.size() > kLongWord) {
      // No merge ever crosses a border of two bytes that no rule has at its middle, so the stretches between
      // such borders are independent: most words of a million letters fall into short ones.
      size_t begin = 0;
      for (size_t i = 1; i <= word.size(); ++i) {
        if (i < word.size() && joints_[Joint(word[i - 1], word[i])]) continue;
        symbols->clear();
        for (size_t j = begin; j < i; ++j) symbols->push_back(byte_ids_[static_cast<unsigned char>(word[j])]);
        merges_.Merge(*symbols, ids);
        begin = i;
      }
      return;
    }
    for (const char c : word) {
      const int32_t id = byte_ids_[static_cast<unsigned char>(c)];
      if (id >= 0) {
        symbols->push_back(id);
      } else {
        AppendUnknown(unknown, symbols);
      }
      unknown = id < 0;
    }
  } else {
    for (size_t pos = 0; pos < word.size();) {
      const size_t bytes = DecodeUtf8(word, pos).bytes;
      const std::string_view character = word.substr(pos, bytes);
      pos += bytes;
      if (const auto it = vocab_.find(character); it != vocab_.end()) {
        symbols->push_back(it->second);
        unknown = false;
        continue;
      }
      const auto byte_id = [&](char c) { return fallback_ids_[static_cast<unsigned char>(c)]; };
      if (byte_fallback_ &&
          std::all_of(character.begin(), character.end(), [&](char c) { return byte_id(c) >= 0; })) {
        for (const char c : character) symbols->push_back(byte_id(c));
        unknown = false;
        continue;
      }
      AppendUnknown(unknown, symbols);
      unknown = true;
    }
  }
  merges_.Merge(*symbols, ids);
}

// Depth first, so that a long text needs no list of its pieces.
void BpeTokenizer::EncodePlain(std::string_view text, std::vector<int32_t>* ids) const {
  if (text.empty()) return;
  Scratch scratch{{}, {}, ids};
  SplitAndEncode(text, 0, &scratch);
}

void BpeTokenizer::SplitAndEncode(std::string_view piece, size_t step, Scratch* scratch) const {
  if (step < splits_.size()) {
    splits_[step]->Split(piece, [&](std::string_view part) { SplitAndEncode(part, step + 1, scratch); });
    return;
  }
  if (byte_level_ && add_prefix_space_ && !piece.starts_with(' ')) {
    scratch->prefixed.assign(1, ' ').append(piece);
    piece = scratch->prefixed;
  }
  if (byte_level_regex_ == nullptr) {
    EncodeWord(piece, &scratch->symbols, scratch->ids);
  } else {
    byte_level_regex_->Split(
        piece, [&](std::string_view word) { EncodeWord(word, &scratch->symbols, scratch->ids); });
  }
}

// One piece between raw added tokens: normalise, cut at normalised added tokens, encode the rest.
void BpeTokenizer::EncodePiece(std::string_view piece,
                               const std::vector<std::pair<size_t, size_t>>& template_ranges,
                               std::vector<int32_t>* ids) const {
  std::string normalized;
  std::vector<std::pair<size_t, size_t>> ranges = template_ranges;
  if (nfc_ && !IsAscii(piece)) {
    if (normalized_matcher_.empty() || template_ranges.empty()) {
      normalized = NormalizeNfc(piece);
    } else {
      // Provenance must survive, so each stretch of one origin is normalised by itself (a combining mark that
      // opens a message does not join the template's last letter).
      ranges.clear();
      size_t pos = 0;
      const auto append = [&](size_t end, bool from_template) {
        const size_t begin = normalized.size();
        normalized += NormalizeNfc(piece.substr(pos, end - pos));
        if (from_template) ranges.emplace_back(begin, normalized.size());
        pos = end;
      };
      for (const auto& [begin, end] : template_ranges) {
        append(begin, false);
        append(end, true);
      }
      append(piece.size(), false);
    }
    piece = normalized;
  }
  std::vector<AddedTokenMatcher::Match> matches;
  size_t floor = 0;
  for (const auto& [begin, end] : ranges) normalized_matcher_.Find(piece, begin, end, &floor, &matches);
  size_t done = 0;
  for (const auto& match : matches) {
    EncodePlain(piece.substr(done, match.begin - done), ids);
    ids->push_back(match.id);
    done = match.end;
  }
  EncodePlain(piece.substr(done), ids);
}

std::vector<int32_t> BpeTokenizer::EncodeJoined(Joined joined) const {
  std::vector<int32_t> ids;
  const std::string_view text = joined.text;
  ids.reserve(text.size());  // the most there can be; large blocks cost nothing until they are touched
  std::vector<AddedTokenMatcher::Match> matches;
  size_t floor = 0;
  for (const auto& [begin, end] : joined.template_ranges)
    raw_matcher_.Find(text, begin, end, &floor, &matches);
  std::vector<std::pair<size_t, size_t>> inside;
  size_t done = 0, range = 0;
  const auto encode = [&](size_t end) {
    if (end <= done) return;
    // Template ranges clipped to [done, end), relative to it. Ranges end in order, so the scan only moves
    // forward.
    inside.clear();
    while (range < joined.template_ranges.size() && joined.template_ranges[range].second <= done) ++range;
    for (size_t i = range; i < joined.template_ranges.size() && joined.template_ranges[i].first < end; ++i) {
      const auto& [b, e] = joined.template_ranges[i];
      inside.emplace_back(std::max(b, done) - done, std::min(e, end) - done);
    }
    EncodePiece(text.substr(done, end - done), inside, &ids);
  };
  for (const auto& match : matches) {
    encode(match.begin);
    ids.push_back(match.id);
    done = match.end;
  }
  encode(text.size());
  ids.shrink_to_fit();
  return ids;
}

std::vector<int32_t> BpeTokenizer::Encode(std::string_view text, bool allow_special) const {
  Joined joined;
  joined.text = IsValidUtf8(text) ? std::string(text) : ReplaceInvalidUtf8(text);
  if (allow_special && !joined.text.empty()) joined.template_ranges.emplace_back(0, joined.text.size());
  return EncodeJoined(std::move(joined));
}

std::vector<int32_t> BpeTokenizer::EncodeSegments(std::span<const PromptSegment> segments) const {
  Joined joined;
  for (const PromptSegment& segment : segments) {
    const size_t begin = joined.text.size();
    if (IsValidUtf8(segment.text)) {
      joined.text += segment.text;
    } else {
      joined.text += ReplaceInvalidUtf8(segment.text);
    }
    if (!segment.from_template || joined.text.size() == begin) continue;
    auto& ranges = joined.template_ranges;
    if (!ranges.empty() && ranges.back().second == begin) {
      ranges.back().second = joined.text.size();
    } else {
      ranges.emplace_back(begin, joined.text.size());
    }
  }
  return EncodeJoined(std::move(joined));
}

std::string BpeTokenizer::Decode(std::span<const int32_t> ids, bool skip_special) const {
  // Not owned: the detokenizer lives in this call only.
  IncrementalDetokenizer detokenizer(std::shared_ptr<const Tokenizer>(std::shared_ptr<void>(), this),
                                     skip_special);
  std::string out;
  for (const int32_t id : ids) out += detokenizer.Add(id);
  out += detokenizer.Finish();
  return out;
}

}  // namespace

StatusOr<std::shared_ptr<const Tokenizer>> Tokenizer::Parse(std::string_view tokenizer_json,
                                                            std::string_view config_json) {
  ASSIGN_OR_RETURN(TokenizerSpec spec, ParseTokenizerJson(tokenizer_json));
  TokenizerConfig config;
  if (!config_json.empty()) {
    ASSIGN_OR_RETURN(config, ParseTokenizerConfig(config_json));
  }
  return BpeTokenizer::Create(std::move(spec), config);
}

StatusOr<std::shared_ptr<const Tokenizer>> Tokenizer::Load(const std::string& folder) {
  const StatusOr<std::string> json = ReadFileText(folder + "/tokenizer.json");
  if (absl::IsNotFound(json.status())) {
    return NotFound(
        "{}/tokenizer.json: is not there; fetch it, or name the folder that has it by --tokenizer-path",
        folder);
  }
  RETURN_IF_ERROR(json.status());
  StatusOr<std::string> config = ReadFileText(folder + "/tokenizer_config.json");
  if (absl::IsNotFound(config.status())) config = std::string();
  RETURN_IF_ERROR(config.status());
  auto tokenizer = Parse(*json, *config);
  if (!tokenizer.ok()) {  // its messages begin with the name of the file
    return Status(
        tokenizer.status().code(),
        fmt::format("{}/{} (fetch the tokenizer's files again, or take a model with such a tokenizer)",
                    folder, Message(tokenizer.status())));
  }
  return tokenizer;
}

}  // namespace sluice
