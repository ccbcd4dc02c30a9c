//! JSON of a request that the network policy judges.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, SeqAccess, Visitor},
};

use super::OutsideError;

/// JSON in which no object has a field twice: the service might read the other one.
pub(super) enum Node {
    Null,
    Bool(bool),
    Number,
    Text(String),
    List(Vec<Node>),
    Object(Vec<(String, Node)>),
}

impl Node {
    /// The fields of a request.
    pub(super) fn fields(body: &[u8]) -> Result<Vec<(String, Self)>, OutsideError> {
        let malformed = |why: String| OutsideError::Malformed(format!("the request is {why}"));
        match serde_json::from_slice(body) {
            Ok(Self::Object(fields)) => Ok(fields),
            Ok(_) => Err(malformed("not an object".to_owned())),
            Err(error) => Err(malformed(format!("malformed: {error}"))),
        }
    }

    pub(super) fn get(&self, wanted: &str) -> Option<&Self> {
        let Self::Object(fields) = self else { return None };
        fields.iter().find(|(name, _)| name == wanted).map(|(_, value)| value)
    }

    /// Whether an object inside has this field.
    pub(super) fn contains_key(&self, wanted: &str) -> bool {
        match self {
            Self::List(items) => items.iter().any(|item| item.contains_key(wanted)),
            Self::Object(fields) => {
                fields.iter().any(|(name, value)| name == wanted || value.contains_key(wanted))
            }
            _ => false,
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Bool(value))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Node, E> {
        Ok(Node::Number)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Node, E> {
        Ok(Node::Number)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Node, E> {
        Ok(Node::Number)
    }

    fn visit_str<E>(self, text: &str) -> Result<Node, E> {
        Ok(Node::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        Ok(Node::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let (mut fields, mut names) = (Vec::new(), std::collections::HashSet::new());
        while let Some(name) = map.next_key::<String>()? {
            let value = map.next_value()?;
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format!("duplicate field `{name}`")));
            }
            fields.push((name, value));
        }
        Ok(Node::Object(fields))
    }
}
