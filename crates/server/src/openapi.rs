//! The OpenAPI page, made from the handlers themselves.

use harvest_proto::api::Problem;
use utoipa::{
    Modify, OpenApi,
    openapi::{
        ContentBuilder, OpenApi as Document, PathItem, Ref, ResponseBuilder,
        path::Operation,
        security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme},
    },
};

use crate::routes::handlers as h;

#[derive(OpenApi)]
#[openapi(
    info(title = "Harvest", description = "Background coding agents on machines you own."),
    modifiers(&Common),
    components(schemas(Problem)),
    paths(
        h::session_list, h::session_create, h::session_get, h::session_delete, h::session_stop,
        h::session_pause, h::session_resume, h::session_terminate, h::session_archive, h::session_fork,
        h::session_restore,
        h::prompt_list, h::prompt_create, h::prompt_cancel, h::prompt_move,
        h::turn_list, h::diff_get, h::snapshot_list, h::event_list, h::blob_get,
        h::exec_run, h::exec_open, h::pty_open, h::file_get, h::file_stat, h::file_put, h::file_delete, h::pull_get,
        h::repository_list, h::repository_add, h::repository_get, h::repository_delete, h::repository_build,
        h::secret_list, h::secret_set, h::secret_delete,
        h::me_get, h::token_list, h::token_create, h::token_delete,
        h::sandbox_list, h::sandbox_create, h::sandbox_get, h::sandbox_delete, h::sandbox_exec, h::sandbox_stop,
        h::sandbox_start, h::sandbox_snapshot, h::sandbox_fork, h::sandbox_restore, h::exec_once,
        h::image_list, h::image_make, h::image_get, h::image_import, h::image_delete, h::image_usage,
        h::volume_list, h::volume_create, h::volume_delete, h::machine_snapshot_list, h::machine_snapshot_delete,
        h::disk_usage, h::collect, h::doctor,
        h::healthz, h::readyz, h::openapi,
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
        for (path, item) in &mut document.paths.paths {
            let open = !path.starts_with("/v1/") || path == "/v1/openapi.json";
            for operation in operations(item) {
                describe(operation, open);
            }
        }
    }
}

fn describe(operation: &mut Operation, open: bool) {
    let problem = || ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem"))).build();
    let failure = |description: &str| {
        ResponseBuilder::new().description(description).content("application/problem+json", problem()).build()
    };
    let responses = &mut operation.responses.responses;
    responses
        .insert("default".into(), failure("Any error; `code` and `hint` say which and what to do").into());
    if !open {
        responses.insert("401".into(), failure("No token, or an unknown one").into());
        operation.security = Some(vec![SecurityRequirement::new("token", Vec::<String>::new())]);
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    let PathItem { get, put, post, delete, patch, head, .. } = item;
    [get, put, post, delete, patch, head].into_iter().flatten()
}
