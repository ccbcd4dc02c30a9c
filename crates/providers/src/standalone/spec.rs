//! Converts API requests to engine specs, and engine sandboxes to API types. Pure.

use harvest_engine::{
    Image, Inspected, Limits, Network, Origin, Owner, ParseVolumeNameError, SandboxState, Spec,
    VolumeMount,
};
use harvest_proto::api::{
    Sandbox, SandboxLimits, SandboxNetwork, SandboxStatus, VolumeMount as Mount,
};
use harvest_session::standalone::{HostError, NewSandbox};

/// The image of a request that names none.
const DEFAULT_IMAGE: &str = "base";

pub(super) fn spec(new: NewSandbox, owner: Owner) -> Result<Spec, HostError> {
    let NewSandbox { id, made_by, order } = new;
    let from = match (order.image, order.from) {
        (Some(_), Some(_)) => {
            let what = "give either `image` or `from`, not both";
            return Err(HostError::invalid("invalid_sandbox", what));
        }
        (image, None) => Origin::Image(image.unwrap_or_else(|| DEFAULT_IMAGE.to_owned())),
        (None, Some(snapshot)) => Origin::Snapshot(snapshot),
    };
    let network = match order.network {
        SandboxNetwork::None => Network::Nothing,
        SandboxNetwork::Host => Network::Host,
        SandboxNetwork::Gateway => {
            let what = "network `gateway` is only for sandboxes of sessions";
            return Err(HostError::invalid("invalid_sandbox", what));
        }
    };
    Ok(Spec {
        id,
        from,
        limits: limits(order.limits),
        network,
        owner,
        binds: Vec::new(),
        volumes: order.volumes.into_iter().map(mount).collect::<Result<_, _>>()?,
        env: order.env,
        made_by,
    })
}

fn limits(given: SandboxLimits) -> Limits {
    let default = Limits::default();
    Limits {
        memory_bytes: given.memory_bytes.unwrap_or(default.memory_bytes),
        cpu_millis_per_second: given.cpu_millis_per_second.unwrap_or(default.cpu_millis_per_second),
        pids: given.pids.unwrap_or(default.pids),
        writable_bytes: given.writable_bytes.or(default.writable_bytes),
        lifetime_secs: given.lifetime_secs.or(default.lifetime_secs),
    }
}

fn mount(given: Mount) -> Result<VolumeMount, HostError> {
    let invalid = |what: String| HostError::invalid("invalid_volume", what);
    if !given.inside.starts_with('/') {
        return Err(invalid(format!("volume path `{}` is not absolute", given.inside)));
    }
    let name =
        given.name.parse().map_err(|error: ParseVolumeNameError| invalid(error.to_string()))?;
    Ok(VolumeMount { name, inside: given.inside.into(), read_only: given.read_only })
}

pub(super) fn api_sandbox(sandbox: Inspected, images: &[Image]) -> Sandbox {
    let image = image(&sandbox, images).map(str::to_owned);
    let Inspected { spec, created_at, state } = sandbox;
    let (state, reason, pid) = match state {
        SandboxState::Running(running) => (SandboxStatus::Running, None, Some(running.pid)),
        SandboxState::Dead { reason } => (SandboxStatus::Dead, Some(reason), None),
        SandboxState::Gone => (SandboxStatus::Dead, Some("gone".to_owned()), None),
    };
    let (layers, config) = match spec.from {
        Origin::Layers { layers, config } => (layers, config),
        // `inspect` always resolves the origin to layers.
        Origin::Image(_) | Origin::Snapshot(_) => Default::default(),
    };
    Sandbox {
        id: spec.id,
        state,
        reason,
        pid,
        image,
        owner: owner(spec.owner),
        made_by: spec.made_by,
        network: match spec.network {
            Network::Nothing => SandboxNetwork::None,
            Network::Door => SandboxNetwork::Gateway,
            Network::Host => SandboxNetwork::Host,
        },
        limits: SandboxLimits {
            memory_bytes: Some(spec.limits.memory_bytes),
            cpu_millis_per_second: Some(spec.limits.cpu_millis_per_second),
            pids: Some(spec.limits.pids),
            writable_bytes: spec.limits.writable_bytes,
            lifetime_secs: spec.limits.lifetime_secs,
        },
        volumes: spec.volumes.into_iter().map(api_mount).collect(),
        env: spec.env,
        user: config.user,
        workdir: config.workdir,
        layers: layers.into_iter().map(String::from).collect(),
        created_at,
    }
}

fn api_mount(mount: VolumeMount) -> Mount {
    let inside = mount.inside.to_string_lossy().into_owned();
    Mount { name: mount.name.to_string(), inside, read_only: mount.read_only }
}

/// The image that shares the most layers with the sandbox.
fn image<'a>(sandbox: &Inspected, images: &'a [Image]) -> Option<&'a str> {
    let Origin::Layers { layers, .. } = &sandbox.spec.from else { return None };
    let bases = images.iter().filter(|image| layers.starts_with(&image.layers));
    bases.max_by_key(|image| image.layers.len()).map(|image| image.name.as_str())
}

fn owner(owner: Owner) -> String {
    match owner {
        Owner::Standalone => "you".to_owned(),
        Owner::Sessions => "session".to_owned(),
        Owner::Process(pid) => format!("process {pid}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harvest_proto::{SandboxId, SnapshotId, api::CreateSandbox};

    fn new(order: CreateSandbox) -> NewSandbox {
        NewSandbox { id: SandboxId::random(), made_by: None, order }
    }

    #[test]
    fn defaults_are_safe() {
        let spec = spec(new(CreateSandbox::default()), Owner::Standalone).unwrap();
        assert_eq!((spec.from, spec.network), (Origin::Image("base".into()), Network::Nothing));
        assert_eq!((spec.limits, spec.owner), (Limits::default(), Owner::Standalone));
    }

    #[test]
    fn invalid_requests_are_refused() {
        let volume = |name: &str, inside: &str| CreateSandbox {
            volumes: vec![Mount { name: name.into(), inside: inside.into(), read_only: false }],
            ..CreateSandbox::default()
        };
        let both = CreateSandbox {
            image: Some("base".into()),
            from: Some(SnapshotId::random()),
            ..CreateSandbox::default()
        };
        let gateway =
            CreateSandbox { network: SandboxNetwork::Gateway, ..CreateSandbox::default() };
        for order in [both, gateway, volume("../x", "/a"), volume("data", "relative")] {
            assert!(spec(new(order.clone()), Owner::Process(1)).is_err(), "{order:?}");
        }
    }
}
