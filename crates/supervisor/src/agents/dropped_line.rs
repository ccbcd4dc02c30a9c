//! The beginning of a line that is too long to be read, as far as it says what the line was. Pure.

use std::fmt;

use serde::de::{Deserializer as _, MapAccess, Visitor};
use serde_json::{Map, Value, json};

/// How much of such a line is kept. Agents write what identifies a message first.
pub(super) const MAX_HEAD_BYTES: usize = 4 * 1024;

/// The fields of the JSON object that begins like this. The value of the last one is incomplete and
/// replaced by an empty object.
pub(super) fn fields(head: &[u8]) -> Map<String, Value> {
    let mut fields = Map::new();
    let mut json = serde_json::Deserializer::from_slice(head);
    // The error is the end of the head.
    let _cut = json.deserialize_map(Collect(&mut fields));
    fields
}

struct Collect<'a>(&'a mut Map<String, Value>);

impl<'de> Visitor<'de> for Collect<'_> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<(), M::Error> {
        while let Some(name) = map.next_key::<String>()? {
            self.0.insert(name.clone(), json!({}));
            let value = map.next_value()?;
            self.0.insert(name, value);
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
        let found = fields(br#"{"id":7,"method":"m","params":{"text":"xxxx"#);
        assert_eq!(Value::Object(found), json!({"id": 7, "method": "m", "params": {}}));
        assert_eq!(Value::Object(fields(br#"{"id":7,"meth"#)), json!({"id": 7}));
        assert_eq!(fields(b"[1,2").len(), 0);
    }

    proptest! {
        #[test]
        fn arbitrary_heads_never_panic(head in proptest::collection::vec(any::<u8>(), 0..200)) {
            fields(&head);
        }
    }
}
