//! The OpenAPI page, made from the handlers themselves.

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
        h::session_pause, h::session_resume, h::session_terminate, h::session_archive, h::session_fork,
        h::session_restore,
        h::prompt_list, h::prompt_create, h::prompt_cancel, h::prompt_move,
        h::turn_list, h::turn_get, h::diff_get, h::diff_files, h::diff_machine, h::snapshot_list, h::snapshot_pin,
        h::retention_get, h::retention_keep, h::event_list, h::blob_get,
        h::exec_run, h::exec_open, h::pty_open, h::file_get, h::file_stat, h::file_put, h::file_delete, h::pull_get,
        h::repository_list, h::repository_add, h::repository_get, h::repository_delete, h::repository_build,
        h::secret_list, h::secret_set, h::secret_delete,
        h::me_get, h::token_list, h::token_create, h::token_delete,
        h::sandbox_list, h::sandbox_create, h::sandbox_get, h::sandbox_delete, h::sandbox_exec, h::sandbox_pty_open,
        h::sandbox_file_get, h::sandbox_file_stat, h::sandbox_file_put, h::sandbox_file_delete, h::sandbox_stop,
        h::sandbox_start, h::sandbox_snapshot, h::sandbox_fork, h::sandbox_restore, h::exec_once,
        h::image_list, h::image_make, h::image_get, h::image_import, h::image_delete, h::image_usage,
        h::volume_list, h::volume_create, h::volume_delete, h::machine_snapshot_list, h::machine_snapshot_delete,
        h::disk_usage, h::collect, h::doctor,
        h::healthz, h::readyz, h::metrics, h::openapi,
    )
)]
struct Api;

/// The description of every route.
#[must_use]
pub fn document() -> Document {
    Api::openapi()
}

/// What all routes have in common: how they fail, and the token.
struct Common;

impl Modify for Common {
    fn modify(&self, document: &mut Document) {
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(bearer));
        spell_ids(components);
        for (path, item) in &mut document.paths.paths {
            let open = !path.starts_with("/v1/") || path == "/v1/openapi.json";
            for (method, operation) in operations(item) {
                describe(operation, method, open);
            }
        }
    }
}

/// Adds how an operation fails, unless it says so itself.
fn describe(operation: &mut Operation, method: &str, open: bool) {
    let takes_body = operation.request_body.is_some();
    let of = |place: ParameterIn| {
        operation.parameters.iter().flatten().any(
            |parameter| matches!(parameter, RefOr::T(parameter) if parameter.parameter_in == place),
        )
    };
    let names_something = of(ParameterIn::Path);
    let asks = takes_body || of(ParameterIn::Query) || of(ParameterIn::Header);
    let changes = method != "get";
    #[rustfmt::skip]
    let failures = [
        ("400", asks, "The request cannot be understood"),
        ("401", !open, "No token, or an unknown one"),
        ("403", true, "Not for the token's user, or sent by another site's page"),
        ("404", names_something || changes, "There is no such thing"),
        ("408", takes_body, "The body took too long"),
        ("409", (changes || names_something) && !open, "It cannot be done as things stand; `code` says what is in the way"),
        ("413", takes_body, "The body is too long"),
        ("415", takes_body, "The body is not of the right type"),
        ("421", true, "Sent to a name that is not this server's"),
        ("422", asks, "The request makes no sense"),
        ("429", true, "Too many requests; `Retry-After` says when to ask again"),
        ("500", true, "A failure of the server's; `request_id` finds it in the log"),
        ("503", true, "The server is stopping or not ready"),
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

/// What an id looks like: its prefix and twelve letters and digits.
fn spell_ids(components: &mut Components) {
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
