//! Parses JSON of a sandbox. serde_json's `Value` takes an object with the key of its `RawValue` as
//! JSON in a string, and parses the string with a new limit of depth: such objects inside each
//! other overflow the stack, which ends the process. The feature that does this cannot be switched
//! off, since axum needs it.
//!
//! A value also takes up to a hundred times the memory of its JSON: [`count_nodes`] tells how many
//! there are before anything is allocated.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error, MapAccess, SeqAccess, Visitor},
};

const PRIVATE_PREFIX: &str = "$serde_json::private::";

/// Parses JSON that has no private keys of serde_json.
///
/// # Errors
/// When the JSON is invalid, has a private key or does not fit the type.
pub fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice::<PlainJson>(bytes)?;
    serde_json::from_slice(bytes)
}

/// At least as many as the JSON has keys and values. Allocates nothing, and does not need valid
/// JSON: no parser gets further than this count.
#[must_use]
pub fn count_nodes(json: &[u8]) -> usize {
    let mut nodes = 1;
    let (mut in_string, mut escaped) = (false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_string,
            b'"' => in_string = !in_string,
            b'[' | b'{' | b',' | b':' if !in_string => nodes += 1,
            _ => {}
        }
    }
    nodes
}

/// JSON without private keys of serde_json; the content is not kept.
#[derive(Debug)]
pub struct PlainJson;

impl<'de> Deserialize<'de> for PlainJson {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for PlainJson {
    type Value = Self;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self, A::Error> {
        while list.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        while map.next_key::<PlainKey>()?.is_some() {
            map.next_value::<Self>()?;
        }
        Ok(self)
    }
}

/// A key as it is after its escapes are resolved.
struct PlainKey;

impl<'de> Deserialize<'de> for PlainKey {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_str(Self)
    }
}

impl Visitor<'_> for PlainKey {
    type Value = Self;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<Self, E> {
        match key.starts_with(PRIVATE_PREFIX) {
            true => Err(E::custom("a key is reserved")),
            false => Ok(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    /// Lists of many levels, each in a string of the one around it.
    fn nested(levels: usize) -> String {
        let quote = |level: usize| match level.checked_sub(1) {
            None => "\"".to_owned(),
            Some(more) => format!("\\{}u0022", "u005c".repeat(more)),
        };
        let (mut start, mut end) = (String::new(), String::new());
        for quote in (0..levels).map(quote) {
            let lists = "[".repeat(120);
            start += &format!("{lists}{{{quote}$serde_json::private::RawValue{quote}:{quote}");
            end = format!("{quote}}}{}{end}", "]".repeat(120));
        }
        format!("{start}0{end}")
    }

    #[test]
    fn json_in_private_keys_is_refused() {
        // Without the check the first one is parsed, and the second one overflows the stack.
        for levels in [1, 300] {
            assert!(from_slice::<Value>(nested(levels).as_bytes()).is_err(), "{levels}");
        }
        let escaped = r#"[{"a":1,"b":{"\u0024serde_json::private::RawValue":"[]"}}]"#;
        assert!(from_slice::<Value>(escaped.as_bytes()).is_err());
    }

    #[test]
    fn plain_json_is_parsed_unchanged() {
        let plain = json!({
            "$serde": [null, true, 1, -1, 1.5, "$serde_json::private::RawValue"], "é\n": {},
        });
        assert_eq!(from_slice::<Value>(plain.to_string().as_bytes()).unwrap(), plain);
        for invalid in ["", "{", "1 2", "{\"a\":}"] {
            assert!(from_slice::<Value>(invalid.as_bytes()).is_err(), "{invalid}");
        }
    }

    #[test]
    fn nodes_are_counted_outside_strings() {
        let objects = format!("[{}0]", "{\"\":0},".repeat(1000));
        assert_eq!(count_nodes(objects.as_bytes()), 3002);
        for (json, nodes) in [
            ("", 1),
            (r#""[{,:""#, 1),
            (r#""\"[,\\",1"#, 2),
            (r#"{"a":[1,"b,"]}"#, 5),
            (r#"[[[[ { ""#, 6),
        ] {
            assert_eq!(count_nodes(json.as_bytes()), nodes, "{json}");
        }
    }

    fn nodes(value: &Value) -> usize {
        1 + match value {
            Value::Array(items) => items.iter().map(nodes).sum(),
            Value::Object(fields) => fields.values().map(|value| 1 + nodes(value)).sum(),
            _ => 0,
        }
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![Just(Value::Null), any::<i64>().prop_map(Value::from), any_text()];
        leaf.prop_recursive(4, 64, 8, |inner| {
            let fields = proptest::collection::vec((".{0,4}", inner.clone()), 0..8);
            prop_oneof![
                proptest::collection::vec(inner, 0..8).prop_map(Value::from),
                fields.prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    fn any_text() -> impl Strategy<Value = Value> {
        r#"["\\\[\]{},:a]{0,8}"#.prop_map(Value::from)
    }

    proptest! {
        #[test]
        fn no_node_is_missed(value in any_json()) {
            prop_assert!(count_nodes(value.to_string().as_bytes()) >= nodes(&value));
        }
    }
}
