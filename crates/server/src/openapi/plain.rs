//! Rewrites schemas that code generators do not support, without a change of meaning: `allOf`
//! around or within a `oneOf`, and objects without a name.

use std::collections::BTreeMap;

use utoipa::openapi::{
    Components, Object, Ref, RefOr, Schema, Type,
    schema::{ArrayItems, OneOf},
};

type Schemas = BTreeMap<String, RefOr<Schema>>;

pub(super) fn simplify(components: &mut Components) {
    let schemas = &mut components.schemas;
    for name in schemas.keys().cloned().collect::<Vec<_>>() {
        name_page_items(schemas, &name);
        name_variants(schemas, &name);
    }
    let composed: Vec<(String, RefOr<Schema>)> = schemas
        .iter()
        .filter_map(|(name, schema)| Some((name.clone(), without_all_of(schemas, name, schema)?)))
        .collect();
    schemas.extend(composed);
    // The variants of `Event` contain its fields, and no operation refers to it.
    schemas.remove("EventBody");
}

/// Generic types contain their argument's schema: a reference replaces it.
fn name_page_items(schemas: &mut Schemas, page: &str) {
    let Some(item) = page.strip_prefix("Page_") else { return };
    let Some(RefOr::T(Schema::Object(object))) = schemas.get_mut(page) else { return };
    let Some(RefOr::T(Schema::Array(array))) = object.properties.get_mut("items") else { return };
    let ArrayItems::RefOrSchema(inline) = &mut array.items else { return };
    if !matches!(&**inline, RefOr::T(Schema::Object(object)) if !is_object(object)) {
        let inline = std::mem::replace(&mut **inline, Ref::from_schema_name(item).into());
        schemas.entry(item.to_owned()).or_insert(inline);
    }
}

/// The content of `{"exited": {…}}` becomes a schema of its own: `SocketOutExited`.
fn name_variants(schemas: &mut Schemas, name: &str) {
    let Some(RefOr::T(Schema::OneOf(variants))) = schemas.get_mut(name) else { return };
    let mut named = Vec::new();
    for variant in &mut variants.items {
        let RefOr::T(Schema::Object(variant)) = variant else { continue };
        if variant.properties.len() != 1 {
            continue;
        }
        for (key, content) in &mut variant.properties {
            if matches!(content, RefOr::T(Schema::Object(inner)) if is_object(inner)) {
                let content_name = format!("{name}{}", camel_case(key));
                let reference = Ref::from_schema_name(content_name.clone()).into();
                named.push((content_name, std::mem::replace(content, reference)));
            }
        }
    }
    schemas.extend(named);
}

fn is_object(schema: &Object) -> bool {
    schema.schema_type == Type::Object.into()
}

/// The schema as one object or a `oneOf` of objects, if it contains an `allOf`.
fn without_all_of(schemas: &Schemas, name: &str, schema: &RefOr<Schema>) -> Option<RefOr<Schema>> {
    let is_all_of = |item: &RefOr<Schema>| matches!(item, RefOr::T(Schema::AllOf(_)));
    let description = match schema {
        RefOr::T(Schema::AllOf(all)) => all.description.clone(),
        RefOr::T(Schema::OneOf(one)) if one.items.iter().any(is_all_of) => one.description.clone(),
        _ => return None,
    };
    let mut objects = alternatives(schemas, schema);
    if objects.len() == 1 {
        let mut object = objects.remove(0);
        object.description = description;
        return Some(Schema::Object(object).into());
    }
    let items =
        objects.into_iter().map(|object| Schema::Object(titled(name, object)).into()).collect();
    Some(Schema::OneOf(OneOf { items, description, ..OneOf::new() }).into())
}

/// The plain objects that a schema allows.
fn alternatives(schemas: &Schemas, schema: &RefOr<Schema>) -> Vec<Object> {
    match schema {
        RefOr::Ref(reference) => {
            let name = reference.ref_location.rsplit('/').next().unwrap_or_default();
            schemas.get(name).map_or_else(Vec::new, |schema| alternatives(schemas, schema))
        }
        RefOr::T(Schema::Object(object)) => vec![object.clone()],
        RefOr::T(Schema::OneOf(one)) => {
            one.items.iter().flat_map(|item| alternatives(schemas, item)).collect()
        }
        RefOr::T(Schema::AllOf(all)) => {
            let parts = all.items.iter().map(|item| alternatives(schemas, item));
            let mut merged = parts.reduce(|left, right| {
                left.iter().flat_map(|one| right.iter().map(|other| merge(one, other))).collect()
            });
            if let Some([object]) = merged.as_deref_mut() {
                object.description.clone_from(&all.description);
            }
            merged.unwrap_or_default()
        }
        RefOr::T(_) => Vec::new(),
    }
}

fn merge(one: &Object, other: &Object) -> Object {
    let mut merged = one.clone();
    merged.properties.extend(other.properties.clone());
    merged.required.extend(other.required.clone());
    merged
}

/// Generators name a variant by its title.
fn titled(name: &str, mut object: Object) -> Object {
    let tag = match object.properties.get("type") {
        Some(RefOr::T(Schema::Object(tag))) => tag.enum_values.as_deref(),
        _ => None,
    };
    object.title =
        tag.and_then(|values| Some(format!("{name}{}", camel_case(values.first()?.as_str()?))));
    object
}

fn camel_case(name: &str) -> String {
    name.split('_')
        .map(|word| {
            let (first, rest) = word.split_at(word.len().min(1));
            first.to_uppercase() + rest
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn events_are_plain_objects_with_titles() {
        let document = serde_json::to_value(crate::document()).unwrap();
        assert!(!document.to_string().contains("\"allOf\""));
        let events = document["components"]["schemas"]["Event"]["oneOf"].as_array().unwrap();
        let evidence =
            events.iter().find(|event| event["title"] == "EventEvidence").expect("it has a title");
        for field in ["seq", "type", "commit"] {
            assert!(evidence["properties"][field].is_object(), "{field} in {evidence}");
        }
    }
}
