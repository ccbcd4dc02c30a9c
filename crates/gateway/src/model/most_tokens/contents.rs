//! What a request contains besides text: images, which use far fewer tokens than their base64 text,
//! and references to input that is stored or fetched, whose size is not known. Pure. Only what the
//! service reads as an image counts: the arguments of tool calls are text.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

// An image uses at most some 5,000 tokens, whatever its size.
const MAX_IMAGE_BYTES: u64 = 15_000;

/// Objects that the model reads as text, whatever they contain.
const TEXT_FIELDS: [&str; 8] = [
    "arguments",
    "args",
    "functionCall",
    "function_call",
    "parameters",
    "input_schema",
    "tools",
    "response",
];
/// The answer of a function, which Gemini lets contain files.
const ANSWERS: [&str; 2] = ["functionResponse", "function_response"];

// The types and schemes that matter are shorter.
const START_CHARS: usize = 24;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Contents {
    /// The bytes of images, beyond those that they may count as text.
    pub(super) image_bytes: u64,
    /// Something is input that the request does not contain.
    pub(super) has_references: bool,
}

impl Contents {
    /// Empty for a body that is not JSON.
    pub(super) fn of(body: &[u8]) -> Self {
        let mut json = serde_json::Deserializer::from_slice(body);
        let top = Values { is_top: true };
        top.deserialize(&mut json).map(|found| found.inside).unwrap_or_default()
    }
}

/// What a value is, and what it contains.
#[derive(Default)]
struct Found {
    inside: Contents,
    text: Option<Text>,
    /// An object whose field `url` is fetched by the service.
    has_url: bool,
}

struct Text {
    start: String,
    length: u64,
}

impl Text {
    fn is_data(&self) -> bool {
        self.start.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"))
    }

    fn is_url(&self) -> bool {
        !self.is_data() && self.start.contains(':')
    }
}

#[derive(Clone, Copy)]
struct Values {
    is_top: bool,
}

impl<'de> DeserializeSeed<'de> for Values {
    type Value = Found;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Found, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Values {
    type Value = Found;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Found, E> {
        Ok(Found::default())
    }

    fn visit_i64<E>(self, _: i64) -> Result<Found, E> {
        Ok(Found::default())
    }

    fn visit_u64<E>(self, _: u64) -> Result<Found, E> {
        Ok(Found::default())
    }

    fn visit_f64<E>(self, _: f64) -> Result<Found, E> {
        Ok(Found::default())
    }

    fn visit_unit<E>(self) -> Result<Found, E> {
        Ok(Found::default())
    }

    fn visit_str<E>(self, text: &str) -> Result<Found, E> {
        let start = text.chars().take(START_CHARS).collect();
        let text = Text { start, length: text.len() as u64 };
        Ok(Found { text: Some(text), ..Found::default() })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Found, A::Error> {
        let mut all = Found::default();
        while let Some(item) = items.next_element_seed(Self { is_top: false })? {
            all.inside.image_bytes += item.inside.image_bytes;
            all.inside.has_references |= item.inside.has_references;
        }
        Ok(all)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Found, A::Error> {
        let (mut object, mut has_url) = (Object::default(), false);
        while let Some(name) = fields.next_key::<String>()? {
            // The messages of one protocol, and the arguments of a tool call of another.
            let is_arguments = name == "input" && !self.is_top;
            if is_arguments || TEXT_FIELDS.contains(&name.as_str()) {
                fields.next_value::<IgnoredAny>()?;
                object.has_more = true;
                continue;
            }
            let found = fields.next_value_seed(Self { is_top: false })?;
            has_url |= name == "url" && found.text.as_ref().is_some_and(Text::is_url);
            object.add(&name, &found);
        }
        let is_item = !self.is_top && object.is_reference();
        let mut inside = object.inside;
        inside.has_references |= is_item;
        inside.image_bytes +=
            if object.is_image == Some(true) { beyond_text(object.data) } else { 0 };
        Ok(Found { inside, text: None, has_url })
    }
}

/// What the fields of an object say.
#[derive(Default)]
struct Object {
    inside: Contents,
    /// The length of the field `data`.
    data: u64,
    is_image: Option<bool>,
    kind: String,
    has_id: bool,
    is_encrypted: bool,
    /// It has fields besides its id and type.
    has_more: bool,
}

impl Object {
    fn add(&mut self, name: &str, found: &Found) {
        self.inside.has_references |= found.inside.has_references || refers(name, found);
        if !ANSWERS.contains(&name) {
            self.inside.image_bytes += found.inside.image_bytes;
        }
        let start = found.text.as_ref().map_or("", |text| &text.start);
        let length = found.text.as_ref().map_or(0, |text| text.length);
        self.has_more |= !matches!(name, "id" | "type");
        match name {
            "media_type" | "mimeType" | "mime_type" => {
                // Of a field that is given twice, the service might read the other one.
                self.is_image = Some(self.is_image.unwrap_or(true) && start.starts_with("image/"));
            }
            "data" => self.data = length,
            "image_url" | "url" if start.starts_with("data:image/") => {
                self.inside.image_bytes += beyond_text(length);
            }
            "id" => self.has_id = length > 0,
            "type" => start.clone_into(&mut self.kind),
            "encrypted_content" => self.is_encrypted = length > 0,
            _ => {}
        }
    }

    /// Whether it is an item of OpenAI that names one of an earlier response: by its type, or by
    /// nothing but its id. Thoughts are stored there, too, unless they are in the request.
    fn is_reference(&self) -> bool {
        let is_stored_thought = self.kind == "reasoning" && !self.is_encrypted;
        self.kind == "item_reference" || self.has_id && (!self.has_more || is_stored_thought)
    }
}

/// Whether a field names a file, or a URL that the service fetches.
fn refers(name: &str, found: &Found) -> bool {
    let text = found.text.as_ref();
    match name.replace('_', "").to_ascii_lowercase().as_str() {
        "fileid" | "fileuri" => text.is_some(),
        "filedata" => text.is_some_and(Text::is_url),
        "source" => found.has_url,
        // The address of a citation, or part of an object with another name.
        "url" => false,
        name => name.ends_with("url") && (found.has_url || text.is_some_and(Text::is_url)),
    }
}

fn beyond_text(bytes: u64) -> u64 {
    bytes.saturating_sub(MAX_IMAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn bytes(body: &Value) -> u64 {
        Contents::of(body.to_string().as_bytes()).image_bytes
    }

    #[test]
    fn images_of_every_protocol_are_found() {
        let (data, url) =
            ("A".repeat(20_000), format!("data:image/png;base64,{}", "A".repeat(19_978)));
        let source = json!({"type": "base64", "media_type": "image/png", "data": data});
        let anthropic = json!({"messages": [{"content": [{"type": "image", "source": source}]}]});
        let part = json!({"type": "input_image", "image_url": url});
        let responses = json!({"input": [{"role": "user", "content": [part, part]}]});
        let chat = json!({"messages": [{"content": [{"image_url": {"url": url}}]}]});
        let inline = json!({"inlineData": {"mimeType": "image/png", "data": data}});
        let gemini = json!({"contents": [{"parts": [inline]}]});
        assert_eq!([&anthropic, &chat, &gemini].map(bytes), [5_000; 3]);
        assert_eq!(bytes(&responses), 10_000);
    }

    #[test]
    fn text_is_no_image() {
        let data = "A".repeat(20_000);
        let image = json!({"media_type": "image/png", "data": data, "url": format!("data:image/png,{data}")});
        let call = |name: &str| json!({"messages": [{"content": [{ name: image }]}]});
        for name in
            ["input", "arguments", "args", "functionCall", "functionResponse", "input_schema"]
        {
            assert_eq!(bytes(&call(name)), 0, "{name}");
        }
        assert_eq!(bytes(&json!({"tools": [image], "text": format!("data:image/png,{data}")})), 0);
        let pages = json!({"media_type": "application/pdf", "data": data});
        assert_eq!(bytes(&json!({"messages": [{"source": pages}]})), 0);
        assert_eq!(Contents::of(b"{\"messages\": ["), Contents::default());
    }

    #[test]
    fn referenced_input_is_held_as_context() {
        let url = "https://files.example.org/a.pdf";
        for part in [
            json!({"type": "document", "source": {"type": "url", "url": url}}),
            json!({"type": "image", "source": {"type": "file", "file_id": "file_1"}}),
            json!({"type": "tool_result", "content": [{"source": {"url": url}}]}),
            json!({"type": "input_file", "file_url": url}),
            json!({"type": "input_image", "image_url": url}),
            json!({"type": "image_url", "image_url": {"url": url}}),
            json!({"type": "input_file", "file_id": "file_1"}),
            json!({"type": "file", "file": {"file_data": url}}),
            json!({"type": "item_reference", "id": "msg_1"}),
            json!({"type": null, "id": "msg_1"}),
            json!({"id": "msg_1"}),
            json!({"type": "image_generation_call", "id": "ig_1"}),
            json!({"type": "reasoning", "id": "rs_1", "summary": []}),
            json!({"audio": {"id": "audio_1"}}),
            json!({"fileData": {"fileUri": url}}),
            json!({"file_data": {"file_uri": url}}),
            json!({"functionResponse": {"response": {}, "parts": [{"fileData": {"fileUri": url}}]}}),
        ] {
            for body in [json!({ "input": [part] }), json!({"messages": [{"content": [part]}]})] {
                let contents = Contents::of(body.to_string().as_bytes());
                assert!(contents.has_references, "{body}");
            }
        }
    }

    #[test]
    fn contained_input_is_no_reference() {
        let url = "https://example.org/a";
        let schema =
            json!({"properties": {"file_id": {"type": "string"}, "image_url": {"type": "string"}}});
        let data = "data:image/png;base64,aGk=";
        for part in [
            json!({"type": "text", "text": url}),
            json!({"type": "search_result", "source": url}),
            json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}),
            json!({"type": "input_image", "image_url": data}),
            json!({"type": "image_url", "image_url": {"url": data}}),
            json!({"type": "file", "file": {"file_data": "JVBERi0xLjQ="}}),
            json!({"type": "url_citation", "url": url}),
            json!({"type": "message", "id": "msg_1", "role": "assistant", "content": []}),
            json!({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}),
            json!({"type": "function_call", "id": "fc_1", "call_id": "c", "arguments": "{}"}),
            json!({"type": "tool_use", "id": "t", "name": "Read", "input": {"file_id": "a"}}),
            json!({"functionCall": {"name": "f", "args": {"fileUri": url}}}),
            json!({"functionResponse": {"name": "f", "response": {"fileUri": url}}}),
        ] {
            let body =
                json!({"input": [part], "tools": [{"parameters": schema}], "schema": schema});
            assert!(!Contents::of(body.to_string().as_bytes()).has_references, "{body}");
        }
    }
}
