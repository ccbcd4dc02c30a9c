//! The OpenAPI document, generated from the handlers.

use harvest_proto::{
    PromptId, SandboxId, SessionId, SnapshotId, TurnId,
    api::{Problem, SocketIn},
};
use utoipa::{
    Modify, OpenApi,
    openapi::{
        Components, ContentBuilder, OpenApi as Document, PathItem, Ref, RefOr, Response,
        ResponseBuilder, Schema,
        path::{Operation, ParameterIn},
        security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme},
    },
};

use crate::routes::handlers as h;

#[derive(OpenApi)]
#[openapi(
    info(title = "Harvest", description = "Background coding agents on machines you own."),
    modifiers(&Common),
    components(schemas(Problem, SocketIn)),
    paths(
        h::session_list, h::session_create, h::session_get, h::session_delete, h::session_stop,
        h::session_pause, h::session_resume, h::session_terminate, h::session_archive,
        h::session_fork, h::session_restore, h::prompt_list, h::prompt_create, h::prompt_cancel,
        h::prompt_move, h::turn_list, h::turn_get, h::diff_get, h::diff_files, h::diff_machine,
        h::snapshot_list, h::snapshot_pin, h::retention_get, h::retention_apply, h::event_list,
        h::blob_get, h::exec_run, h::exec_open, h::pty_open, h::file_get, h::file_stat, h::file_put,
        h::file_delete, h::pull_request_get, h::repository_list, h::repository_add,
        h::repository_get, h::repository_delete, h::repository_build, h::secret_list, h::secret_set,
        h::secret_delete, h::me_get, h::token_list, h::token_create, h::token_delete,
        h::sandbox_list, h::sandbox_create, h::sandbox_get, h::sandbox_delete, h::sandbox_exec,
        h::sandbox_pty_open, h::sandbox_file_get, h::sandbox_file_stat, h::sandbox_file_put,
        h::sandbox_file_delete, h::sandbox_stop, h::sandbox_start, h::sandbox_snapshot,
        h::sandbox_fork, h::sandbox_restore, h::exec_once, h::image_list, h::image_create,
        h::image_get, h::image_import, h::image_delete, h::image_usage, h::volume_list,
        h::volume_create, h::volume_delete, h::stored_snapshot_list, h::stored_snapshot_delete,
        h::disk_usage, h::collect_garbage, h::doctor, h::healthz, h::readyz, h::metrics, h::openapi,
    )
)]
struct Api;

/// The OpenAPI document of every route.
#[must_use]
pub fn document() -> Document {
    Api::openapi()
}

/// Adds the parts common to all routes: error responses and the bearer token.
struct Common;

impl Modify for Common {
    fn modify(&self, document: &mut Document) {
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(bearer));
        add_id_patterns(components);
        for (path, item) in &mut document.paths.paths {
            let open = !path.starts_with("/v1/") || path == "/v1/openapi.json";
            for (method, operation) in operations(item) {
                add_failures(operation, method, open);
            }
        }
    }
}

/// Adds error responses that the operation does not declare itself.
fn add_failures(operation: &mut Operation, method: &str, open: bool) {
    let takes_body = operation.request_body.is_some();
    let has = |location: ParameterIn| {
        operation.parameters.iter().flatten().any(|parameter| match parameter {
            RefOr::T(parameter) => parameter.parameter_in == location,
            RefOr::Ref(_) => false,
        })
    };
    let has_path = has(ParameterIn::Path);
    let has_input = takes_body || has(ParameterIn::Query) || has(ParameterIn::Header);
    let changes = method != "get";
    #[rustfmt::skip]
    let failures = [
        ("400", has_input, "The request is malformed"),
        ("401", !open, "The token is missing, unknown or revoked"),
        ("403", true, "Not allowed for this user, or sent by a page of another origin"),
        ("404", has_path || changes, "Not found"),
        ("408", takes_body, "The body did not arrive in time"),
        ("409", (changes || has_path) && !open, "Not possible in the current state; `code` says why"),
        ("413", takes_body, "The body is too large"),
        ("415", takes_body, "The content type is not supported"),
        ("421", true, "The `Host` header is not a name of this server"),
        ("422", has_input, "The request is invalid"),
        ("429", true, "Too many requests; see `Retry-After`"),
        ("500", true, "Internal error; `request_id` identifies it in the log"),
        ("503", true, "The server is shutting down or not ready"),
    ];
    for (status, applies, description) in failures {
        if applies {
            operation
                .responses
                .responses
                .entry(status.to_owned())
                .or_insert_with(|| failure(description).into());
        }
    }
    if !open {
        operation.security = Some(vec![SecurityRequirement::new("token", Vec::<String>::new())]);
    }
}

fn failure(description: &str) -> Response {
    let problem = ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem"))).build();
    ResponseBuilder::new()
        .description(description)
        .content("application/problem+json", problem)
        .build()
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

fn operations(item: &mut PathItem) -> impl Iterator<Item = (&'static str, &mut Operation)> {
    let PathItem { get, put, post, delete, patch, head, .. } = item;
    let named = [
        ("get", get),
        ("put", put),
        ("post", post),
        ("delete", delete),
        ("patch", patch),
        ("head", head),
    ];
    named.into_iter().filter_map(|(name, operation)| Some((name, operation.as_mut()?)))
}
