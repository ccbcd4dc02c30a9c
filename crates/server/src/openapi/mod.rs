//! The OpenAPI document, generated from the routes.

mod plain;

use axum::routing::MethodFilter;
use harvest_proto::{
    PromptId, SandboxId, SessionId, SnapshotId, TurnId,
    api::{Problem, SocketIn},
};
use utoipa::{
    OpenApi,
    openapi::{
        Components, ContentBuilder, Header, HeaderBuilder, ObjectBuilder, OpenApi as Document,
        PathItem, Ref, RefOr, Required, Response, ResponseBuilder, Schema, Type,
        path::{Operation, Parameter, ParameterBuilder, ParameterIn},
        security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme},
    },
};

use crate::{
    authorization::Access,
    idempotency::MAX_KEY_BYTES,
    routes::{self, route::Rule},
};

#[derive(OpenApi)]
#[openapi(
    info(title = "Harvest", description = "Background coding agents on machines you own."),
    components(schemas(Problem, SocketIn))
)]
struct Common;

/// The OpenAPI document of every route.
#[must_use]
pub fn document() -> Document {
    let mut document = Common::openapi();
    document.merge(routes::routes().document);
    document.merge(routes::sandboxes::routes().document);
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
    let components = document.components.get_or_insert_default();
    components.add_security_scheme("token", SecurityScheme::Http(bearer));
    add_id_patterns(components);
    add_secrets(components);
    plain::simplify(components);
    for (status, description) in FAILURES {
        components.responses.insert(problem_name(status), failure(description).into());
    }
    document
}

/// Adds what follows from the route's path and rule: parameters of the path, the idempotency key,
/// the path of a new resource, error responses that the operation does not declare itself, and the
/// bearer token.
pub(crate) fn complete(operation: &mut Operation, path: &str, method: MethodFilter, rule: &Rule) {
    add_path_parameters(operation, path);
    if rule.repeat.is_some() {
        operation.parameters.get_or_insert_default().push(idempotency_key().into());
    }
    if let Some(RefOr::T(created)) = operation.responses.responses.get_mut("201") {
        created.headers.insert("Location".to_owned(), location().into());
    }
    let open = rule.access == Access::Open;
    add_failures(operation, method, open);
    if !open {
        operation.security = Some(vec![SecurityRequirement::new("token", Vec::<String>::new())]);
    }
}

/// The path parameters that mean the same in every route: name, schema and description.
const PATH_PARAMETERS: [(&str, &str, &str); 4] = [
    ("session", SESSION_NAME, "The session's id, or the key of one that you created"),
    ("sandbox", "SandboxId", "The sandbox"),
    ("prompt", "PromptId", "The prompt"),
    ("snapshot", "SnapshotId", "The snapshot"),
];

fn add_path_parameters(operation: &mut Operation, path: &str) {
    // In reverse, because each one is inserted before the others.
    for (name, schema, description) in PATH_PARAMETERS.into_iter().rev() {
        let is_given =
            |given: &RefOr<Parameter>| matches!(given, RefOr::T(given) if given.name == name);
        if path.contains(&format!("{{{name}}}"))
            && !operation.parameters.iter().flatten().any(is_given)
        {
            let parameter = ParameterBuilder::new()
                .name(name)
                .parameter_in(ParameterIn::Path)
                .required(Required::True)
                .description(Some(description))
                .schema(Some(parameter_schema(schema)))
                .build();
            operation.parameters.get_or_insert_default().insert(0, parameter.into());
        }
    }
}

/// An id, or the text that a user calls a session by.
const SESSION_NAME: &str = "SessionName";

fn parameter_schema(schema: &str) -> RefOr<Schema> {
    match schema {
        SESSION_NAME => {
            let text = ObjectBuilder::new().schema_type(Type::String);
            Schema::Object(text.min_length(Some(1)).max_length(Some(200)).build()).into()
        }
        id => Ref::from_schema_name(id).into(),
    }
}

fn location() -> Header {
    let path = ObjectBuilder::new().schema_type(Type::String);
    HeaderBuilder::new()
        .schema(Some(path))
        .description(Some("Path of the new resource; of the first one, if there are several"))
        .build()
}

fn idempotency_key() -> Parameter {
    let key = ObjectBuilder::new()
        .schema_type(Type::String)
        .min_length(Some(1))
        .max_length(Some(MAX_KEY_BYTES))
        .pattern(Some("^[!-~]*$"));
    ParameterBuilder::new()
        .name("Idempotency-Key")
        .parameter_in(ParameterIn::Header)
        .description(Some("Repeated requests with the same key have one effect"))
        .schema(Some(key))
        .build()
}

fn add_failures(operation: &mut Operation, method: MethodFilter, open: bool) {
    let takes_body = operation.request_body.is_some();
    let has = |location: ParameterIn| {
        operation.parameters.iter().flatten().any(|parameter| match parameter {
            RefOr::T(parameter) => parameter.parameter_in == location,
            RefOr::Ref(_) => false,
        })
    };
    let has_path = has(ParameterIn::Path);
    let has_input = takes_body || has(ParameterIn::Query) || has(ParameterIn::Header);
    let changes = method != MethodFilter::GET;
    let responses = &mut operation.responses.responses;
    if responses.contains_key("101") {
        let upgrade_required = failure("Not a WebSocket upgrade request");
        responses.insert("426".to_owned(), upgrade_required.into());
    }
    let applies = |status: &str| match status {
        "400" | "422" => has_input,
        "401" => !open,
        "404" => has_path || changes,
        "408" | "413" | "415" => takes_body,
        "409" => (changes || has_path) && !open,
        _ => true,
    };
    for (status, _) in FAILURES.into_iter().filter(|(status, _)| applies(status)) {
        responses
            .entry(status.to_owned())
            .or_insert_with(|| Ref::from_response_name(problem_name(status)).into());
    }
}

/// The error responses of all routes.
const FAILURES: [(&str, &str); 13] = [
    ("400", "The request is malformed"),
    ("401", "The token is missing, unknown or revoked"),
    ("403", "Not allowed for this user, or sent by a page of another origin"),
    ("404", "Not found"),
    ("408", "The body did not arrive in time"),
    ("409", "Not possible in the current state; `code` says why"),
    ("413", "The body is too large"),
    ("415", "The content type is not supported"),
    ("421", "The `Host` header is not a name of this server"),
    ("422", "The request is invalid"),
    ("429", "Too many requests; see `Retry-After`"),
    ("500", "Internal error; `request_id` identifies it in the log"),
    ("503", "The server is shutting down or not ready"),
];

fn problem_name(status: &str) -> String {
    format!("Problem{status}")
}

fn failure(description: &str) -> Response {
    let problem = ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem"))).build();
    ResponseBuilder::new()
        .description(description)
        .content("application/problem+json", problem)
        .build()
}

/// The secrets of a new session. Their type has no serialization, so that they cannot get into a
/// response by accident; for that reason utoipa leaves them out.
fn add_secrets(components: &mut Components) {
    let Some(RefOr::T(Schema::Object(session))) = components.schemas.get_mut("CreateSession")
    else {
        return;
    };
    let value = ObjectBuilder::new().schema_type(Type::String).build();
    let secrets = ObjectBuilder::new()
        .schema_type(Type::Object)
        .description(Some(
            "Secrets of the session by name, such as `GITHUB_TOKEN`. Only the gateway uses them. \
             They are deleted with the session.",
        ))
        .additional_properties(Some(Schema::from(value)))
        .write_only(true)
        .build();
    session.properties.insert("secrets".to_owned(), secrets.into());
}

/// Ids are a prefix and twelve characters.
fn add_id_patterns(components: &mut Components) {
    let ids = [
        ("SessionId", SessionId::PREFIX),
        ("PromptId", PromptId::PREFIX),
        ("TurnId", TurnId::PREFIX),
        ("SandboxId", SandboxId::PREFIX),
        ("SnapshotId", SnapshotId::PREFIX),
    ];
    for (name, prefix) in ids {
        if let Some(RefOr::T(Schema::Object(object))) = components.schemas.get_mut(name) {
            object.pattern = Some(format!("^{prefix}_[0-9a-hjkmnp-tv-z]{{12}}$"));
        }
    }
}

pub(crate) fn operations(
    item: &mut PathItem,
) -> impl Iterator<Item = (MethodFilter, &mut Operation)> {
    let PathItem { get, put, post, delete, patch, head, .. } = item;
    let operations = [
        (MethodFilter::GET, get),
        (MethodFilter::PUT, put),
        (MethodFilter::POST, post),
        (MethodFilter::DELETE, delete),
        (MethodFilter::PATCH, patch),
        (MethodFilter::HEAD, head),
    ];
    operations.into_iter().filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}
