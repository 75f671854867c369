// Which keywords of JSON Schema are held, which say nothing about a value, and which are refused. Internal to
// grammar/.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include "base/status.h"
#include "grammar/syntax.h"

namespace sluice {

// title, description, default, $defs and the like.
bool IsAnnotation(std::string_view keyword);
// Invalid names the first keyword that is neither held nor an annotation.
Status CheckSchemaKeywords(const OrderedJson& schema, const std::string& at);
// From "type" (a name or a list, `nullable`), else from the keywords; empty: not told.
std::set<std::string> SchemaTypes(const OrderedJson& schema);
bool IsOfType(const OrderedJson& value, const std::set<std::string>& types);
// A regular expression for a `format`; Invalid lists those that are held.
StatusOr<std::string> FormatPattern(const std::string& format, const std::string& at);
// All keywords that are held, for the documentation.
std::string SupportedSchemaKeywords();

}  // namespace sluice
