//! The beginning of a line that is too large to be interpreted, as far as it says what the line
//! was. Pure.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

/// How much of such a line is kept. Agents write what identifies a message first.
pub(super) const MAX_HEAD_BYTES: usize = 4 * 1024;

/// The fields of the JSON object that begins like this, and those of the objects inside it. A value
/// that is incomplete and no object is replaced by an empty object.
pub(super) fn fields(head: &[u8]) -> Map<String, Value> {
    let mut value = Value::Null;
    // The error is the end of the head.
    let _cut = Collect(&mut value).deserialize(&mut serde_json::Deserializer::from_slice(head));
    match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

/// Keeps what it has read when an error ends it. Unlike `Value` it knows no private keys, see
/// [`harvest_proto::json`].
struct Collect<'a>(&'a mut Value);

impl<'de> DeserializeSeed<'de> for Collect<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Collect<'_> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        *self.0 = Value::Null;
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        *self.0 = value.into();
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        *self.0 = value.into();
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        *self.0 = value.into();
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        *self.0 = value.into();
        Ok(())
    }

    fn visit_str<E>(self, value: &str) -> Result<(), E> {
        *self.0 = value.into();
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let mut items = Vec::new();
        let mut item = Value::Null;
        while list.next_element_seed(Collect(&mut item))?.is_some() {
            items.push(item.take());
        }
        *self.0 = items.into();
        Ok(())
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<(), M::Error> {
        *self.0 = json!({});
        while let Some(name) = map.next_key::<String>()? {
            let value = &mut self.0[name];
            *value = json!({});
            map.next_value_seed(Collect(value))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_before_the_cut_are_known() {
        let found =
            fields(br#"{"id":7,"method":"m","params":{"a":[1,{}],"b":{"c":"d","text":"xxxx"#);
        let params = json!({"a": [1, {}], "b": {"c": "d", "text": {}}});
        assert_eq!(Value::Object(found), json!({"id": 7, "method": "m", "params": params}));
        assert_eq!(Value::Object(fields(br#"{"id":7,"list":[1,2"#)), json!({"id": 7, "list": {}}));
        assert_eq!(Value::Object(fields(br#"{"id":7,"meth"#)), json!({"id": 7}));
        assert_eq!(fields(b"[1,2").len(), 0);
    }

    #[test]
    fn json_in_private_keys_is_not_parsed() {
        let found = fields(br#"{"id":7,"x":{"$serde_json::private::RawValue":"[]"},"y":"#);
        assert_eq!((&found["id"], found["x"].is_object()), (&json!(7), true));
    }

    proptest! {
        #[test]
        fn arbitrary_heads_never_panic(head in proptest::collection::vec(any::<u8>(), 0..200)) {
            fields(&head);
        }
    }
}
