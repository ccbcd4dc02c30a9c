//! How many bytes of a request are images, which use far fewer tokens than their base64 text. Pure.
//! Only what the service reads as an image counts: the arguments of tool calls are text.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

// An image uses at most some 5,000 tokens, whatever its size.
const MAX_IMAGE_BYTES: u64 = 15_000;

/// Objects that the model reads as text, whatever they contain.
const TEXT_FIELDS: [&str; 9] = [
    "arguments",
    "args",
    "functionCall",
    "function_call",
    "functionResponse",
    "function_response",
    "parameters",
    "input_schema",
    "tools",
];

/// The bytes of images in a request, beyond those that they may count as text. Zero for a body that
/// is not JSON.
pub(super) fn image_bytes(body: &[u8]) -> u64 {
    let mut json = serde_json::Deserializer::from_slice(body);
    let top = Images { is_top: true };
    top.deserialize(&mut json).map_or(0, |found| found.images)
}

/// What a value contains.
#[derive(Default)]
struct Found {
    /// Bytes of images inside.
    images: u64,
    /// The length of a text.
    length: u64,
    /// The text is the type of an image.
    is_type: bool,
    /// The text is a URL that contains an image.
    is_url: bool,
}

#[derive(Clone, Copy)]
struct Images {
    is_top: bool,
}

impl<'de> DeserializeSeed<'de> for Images {
    type Value = Found;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Found, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Images {
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
        Ok(Found {
            images: 0,
            length: text.len() as u64,
            is_type: text.starts_with("image/"),
            is_url: text.starts_with("data:image/"),
        })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Found, A::Error> {
        let mut all = Found::default();
        while let Some(item) = items.next_element_seed(Self { is_top: false })? {
            all.images += item.images;
        }
        Ok(all)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Found, A::Error> {
        let (mut all, mut data, mut is_image) = (Found::default(), 0, None);
        while let Some(name) = fields.next_key::<String>()? {
            // The messages of one protocol, and the arguments of a tool call of another.
            let is_arguments = name == "input" && !self.is_top;
            if is_arguments || TEXT_FIELDS.contains(&name.as_str()) {
                fields.next_value::<IgnoredAny>()?;
                continue;
            }
            let found = fields.next_value_seed(Self { is_top: false })?;
            all.images += found.images;
            match name.as_str() {
                "media_type" | "mimeType" | "mime_type" => {
                    // Of a field that is given twice, the service might read the other one.
                    is_image = Some(is_image.unwrap_or(true) && found.is_type);
                }
                "data" => data = found.length,
                "image_url" | "url" if found.is_url => all.images += beyond_text(found.length),
                _ => {}
            }
        }
        all.images += if is_image == Some(true) { beyond_text(data) } else { 0 };
        Ok(all)
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
        image_bytes(body.to_string().as_bytes())
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
        for name in ["input", "arguments", "args", "functionCall", "input_schema"] {
            assert_eq!(bytes(&call(name)), 0, "{name}");
        }
        assert_eq!(bytes(&json!({"tools": [image], "text": format!("data:image/png,{data}")})), 0);
        let pages = json!({"media_type": "application/pdf", "data": data});
        assert_eq!(bytes(&json!({"messages": [{"source": pages}]})), 0);
        assert_eq!(image_bytes(b"{\"messages\": ["), 0);
    }
}
