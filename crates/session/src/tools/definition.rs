//! How a tool is described to an agent, inside a sandbox or on a laptop.

use serde_json::{Map, Value, json};

/// A tool as `tools/list` describes it.
pub struct Definition {
    pub name: &'static str,
    pub description: &'static str,
    pub effect: Effect,
    /// The required arguments.
    pub arguments: Arguments,
    pub optional: Arguments,
}

/// The names of arguments with their schemas.
type Arguments = &'static [(&'static str, fn() -> Value)];

/// What a call changes; agents ask before some effects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    Reads,
    Adds,
    Deletes,
}

impl Definition {
    /// Finds a required argument that is missing, or one that the tool does not have.
    ///
    /// # Errors
    /// Why the arguments do not fit.
    pub fn check(&self, given: &Map<String, Value>) -> Result<(), String> {
        let known = || self.arguments.iter().chain(self.optional).map(|(name, _)| *name);
        if let Some((missing, _)) =
            self.arguments.iter().find(|(name, _)| !given.contains_key(*name))
        {
            return Err(format!("`{missing}` is missing"));
        }
        match given.keys().find(|name| known().all(|one| one != name.as_str())) {
            Some(unknown) => {
                let all: Vec<_> = known().collect();
                Err(format!("there is no argument `{unknown}`; known are {}", all.join(", ")))
            }
            None => Ok(()),
        }
    }

    #[must_use]
    pub fn to_json(&self) -> Value {
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

#[must_use]
pub fn text(description: &str) -> Value {
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
