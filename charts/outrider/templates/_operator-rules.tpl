{{/* What the operator may do where the services are: as a ClusterRole, or as a Role in each watched namespace. */}}
{{- define "outrider.operatorRules" -}}
# Services: read. The operator never writes a spec, so it has no write verb here.
- apiGroups: [outrider.dev]
  resources: [speculativeservices]
  verbs: [get, list, watch]
# Status: replaced by its one writer.
- apiGroups: [outrider.dev]
  resources: [speculativeservices/status]
  verbs: [update]
# Children that live as long as the service. get, list, watch: compare with what should be; create; patch: server-side
# apply. No delete: the garbage collector removes them with the service.
# delete: of a Deployment, that of a draft canary which is over.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
# A NetworkPolicy for each service (servingNetworkPolicy). list: also those of others, to name the one that keeps the
# operator from a pod; delete: when the value is switched off.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# An InferencePool for each service that asks for one (gateway.inferencePool). delete: when that is switched off.
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, create, patch, delete]
# The LeaderWorkerSet of a service whose replicas are groups of pods (engine.nodes). delete: when replicas are single pods
# again.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, create, patch, delete]
# Their StatefulSets tell which pods are of a group.
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch]
# Revisions and profiles. delete: a revision's ConfigMap goes when no ReplicaSet needs it any more.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch, delete]
# Profiling. create; delete: after the result is stored, or when no service needs it any more; patch: another service that
# waits for the same measurement becomes an owner too.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
# ReplicaSets tell which revisions are still in use.
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [get, list, watch]
# Pods: readiness, the termination messages of profiling Jobs; patch: two annotations, of which the pod reads its GPU product,
# and by which the kubelet brings a changed configuration into a running pod within seconds.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch]
# Events on the services; list: those of a pod that cannot start, or a Job whose pod cannot be made, for the sentence in
# the condition (a missing model folder, or a quota, shows nowhere else).
- apiGroups: [""]
  resources: [events]
  verbs: [create, list]
{{- end }}
