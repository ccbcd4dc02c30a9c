//! How a tool is described to an agent.

use serde_json::{Map, Value, json};

/// A tool as `tools/list` describes it.
pub(super) struct Definition {
    pub(super) name: &'static str,
    pub(super) description: &'static str,
    pub(super) effect: Effect,
    /// The required arguments.
    pub(super) arguments: Arguments,
    pub(super) optional: Arguments,
}

/// The names of arguments with their schemas.
type Arguments = &'static [(&'static str, fn() -> Value)];

/// What a call changes; agents ask before some effects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    Reads,
    Adds,
    Deletes,
}

impl Definition {
    pub(super) fn to_json(&self) -> Value {
        let all = self.arguments.iter().chain(self.optional);
        let properties: Map<String, Value> =
            all.map(|(name, schema)| ((*name).to_owned(), schema())).collect();
        let required: Vec<&str> = self.arguments.iter().map(|(name, _)| *name).collect();
        json!({
            "name": self.name,
            "description": self.description,
            "inputSchema": {
                "type": "object",
                "properties": properties,
                "required": required,
            },
            "annotations": {
                "readOnlyHint": self.effect == Effect::Reads,
                "destructiveHint": self.effect == Effect::Deletes,
                "openWorldHint": false,
            },
        })
    }
}

pub(super) fn text(description: &str) -> Value {
    json!({ "type": "string", "description": description })
}

pub(super) fn texts(description: &str) -> Value {
    json!({ "type": "array", "items": { "type": "string" }, "description": description })
}

/// An array of objects whose fields are all required.
pub(super) fn objects(fields: &[(&str, Value)]) -> Value {
    let names: Vec<&str> = fields.iter().map(|(name, _)| *name).collect();
    let properties: Map<String, Value> =
        fields.iter().map(|(name, schema)| ((*name).to_owned(), schema.clone())).collect();
    let items = json!({ "type": "object", "properties": properties, "required": names });
    json!({ "type": "array", "items": items })
}
