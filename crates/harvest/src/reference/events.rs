//! The page of the events, from the API's description.

use std::collections::BTreeSet;

use serde_json::Value;

use super::REGENERATE;

/// What every event has; the top of the page explains it.
const COMMON: [&str; 4] = ["at", "seq", "turn", "type"];

/// A page about the events in an OpenAPI document.
pub(super) fn page(document: &Value) -> String {
    let schemas = &document["components"]["schemas"];
    let mut page = format!(
        "# Events\n\nGenerated from the code by `{REGENERATE}`.\n\n\
         A session's history is a list of events. `harvest events SESSION` prints them, one JSON\n\
         object per line; `GET /v1/sessions/{{session}}/events` returns pages of them, or a stream\n\
         (SSE) that continues with new ones. Each has:\n\n\
         | field | meaning |\n|---|---|\n\
         | `type` | the kind, below |\n\
         | `seq` | its number in the session: 1, 2, 3… without gaps; the cursor of pages and streams |\n\
         | `at` | its time |\n\
         | `turn` | the turn that it belongs to, if any |\n\n\
         Stored events never change. Clients skip types and fields that they do not know.\n"
    );
    let mut named = BTreeSet::new();
    for event in schemas["Event"]["oneOf"].as_array().into_iter().flatten() {
        let kind = event["properties"]["type"]["enum"][0].as_str().unwrap_or_default();
        page += &format!("\n## `{kind}`\n\n{}\n", described(event));
        page += &fields(event, &mut named);
    }
    page += "\n# Types of fields\n";
    // Fields of objects name further types.
    let mut done = BTreeSet::new();
    while let Some(name) = named.iter().find(|name| !done.contains(*name)).cloned() {
        definition(&name, &schemas[&name], &mut named);
        done.insert(name);
    }
    for name in done {
        page += &definition(&name, &schemas[&name], &mut named);
    }
    page
}

fn described(schema: &Value) -> String {
    schema["description"].as_str().unwrap_or_default().replace('\n', " ")
}

/// The table of an object's fields.
fn fields(object: &Value, named: &mut BTreeSet<String>) -> String {
    let required: Vec<_> =
        object["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut rows = String::new();
    for (name, schema) in object["properties"].as_object().into_iter().flatten() {
        if COMMON.contains(&name.as_str()) && object["properties"].get("seq").is_some() {
            continue;
        }
        let optional = if required.contains(&name.as_str()) { "" } else { ", optional" };
        let of = type_of(schema, named);
        let meaning = match described(schema) {
            text if text.is_empty() => described(&schema["oneOf"][0]),
            text => text,
        };
        rows += &format!("| `{name}` | {of}{optional} | {} |\n", meaning.replace('|', "\\|"));
    }
    if rows.is_empty() {
        return rows;
    }
    format!("\n| field | type | meaning |\n|---|---|---|\n{rows}")
}

/// A schema in words. Names of other schemas are added to `named`.
fn type_of(schema: &Value, named: &mut BTreeSet<String>) -> String {
    if let Some(path) = schema["$ref"].as_str() {
        let name = path.rsplit('/').next().unwrap_or_default();
        named.insert(name.to_owned());
        return format!("`{name}`");
    }
    if let Some(parts) = schema["oneOf"].as_array() {
        let parts = parts.iter().filter(|part| part["type"] != "null");
        return parts.map(|part| type_of(part, named)).collect::<Vec<_>>().join(" or ");
    }
    let kinds = match &schema["type"] {
        Value::String(kind) => vec![kind.as_str()],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => return "any JSON".to_owned(),
    };
    let word = |kind: &str, named: &mut BTreeSet<String>| match kind {
        "array" => format!("list of {}", type_of(&schema["items"], named)),
        "integer" | "number" => "number".to_owned(),
        "boolean" => "`true` or `false`".to_owned(),
        "string" => values(schema).unwrap_or_else(|| "text".to_owned()),
        other => other.to_owned(),
    };
    let kinds = kinds.into_iter().filter(|kind| *kind != "null");
    kinds.map(|kind| word(kind, named)).collect::<Vec<_>>().join(" or ")
}

/// The values of an enumeration.
fn values(schema: &Value) -> Option<String> {
    let values = schema["enum"].as_array()?.iter().filter_map(Value::as_str);
    Some(values.map(|value| format!("`{value}`")).collect::<Vec<_>>().join(", "))
}

/// The section of a type.
fn definition(name: &str, schema: &Value, named: &mut BTreeSet<String>) -> String {
    let mut section = format!("\n## {name}\n\n{}\n", described(schema));
    if let Some(values) = values(schema) {
        section += &format!("\nOne of {values}.\n");
    }
    section += &fields(schema, named);
    for variant in schema["oneOf"].as_array().into_iter().flatten() {
        let text = match values(variant) {
            Some(value) => format!("\n- {value}: {}", described(variant)),
            None => fields(variant, named),
        };
        section += &text;
    }
    if section.ends_with('\n') { section } else { section + "\n" }
}
