{{/* Sets each value that the release's values lack to its default. Every template begins with it: `helm upgrade --reuse-values`
     renders with the values of an older chart, and a null removes a value. */}}
{{- define "outrider.fill" -}}
{{- range $path, $default := include "outrider.defaults" . | fromYaml }}
{{- $names := splitList "." $path }}
{{- $part := $.Values }}
{{- range initial $names }}
{{- if not (kindIs "map" (get $part .)) }}{{ $_ := set $part . dict }}{{ end }}
{{- $part = get $part . }}
{{- end }}
{{- if not (hasKey $part (last $names)) }}{{ $_ := set $part (last $names) $default }}{{ end }}
{{- end }}
{{- end }}

{{/* Name of every object of the release that needs no other. */}}
{{- define "outrider.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* Name of cluster-scoped objects: two releases in two namespaces must not share them. */}}
{{- define "outrider.clusterName" -}}
{{ printf "%s:%s" .Release.Namespace (include "outrider.fullname" .) }}
{{- end }}

{{- define "outrider.selector" -}}
app.kubernetes.io/name: outrider-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "outrider.labels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "outrider.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "outrider.fullname" .) }}
{{- else }}{{ required "serviceAccount.name: name one that exists, or set serviceAccount.create" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{/* Name of the profiling Jobs' priority class; empty for none. Cluster-scoped, and no colon is allowed in it. Its value
     is immutable in Kubernetes, so it stands in the name. */}}
{{- define "outrider.priorityClass" -}}
{{- if .Values.profiling.priorityClass.create -}}
{{- $value := .Values.profiling.priorityClass.value | toString | replace "-" "minus-" }}
{{- .Values.profiling.priorityClass.name | default (printf "%s.%s-profiling-%s" .Release.Namespace (include "outrider.fullname" .) $value) }}
{{- else }}{{ .Values.profiling.priorityClass.name }}{{ end }}
{{- end }}

{{/* The peers that may reach the serving pods' port 9000, as JSON: this operator, and what the values name. */}}
{{- define "outrider.adminPortPeers" -}}
{{- if .Values.servingNetworkPolicy.enabled }}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace) }}
{{- $pods := dict "matchLabels" (include "outrider.selector" . | fromYaml) }}
{{- concat (list (dict "namespaceSelector" $namespace "podSelector" $pods)) .Values.servingNetworkPolicy.monitoring | toJson }}
{{- end }}
{{- end }}

{{/* "true" where pods must name no user: said by the values, else seen by OpenShift's own API. */}}
{{- define "outrider.platformAssignsUser" -}}
{{- if kindIs "invalid" .Values.platformAssignsUser }}{{ .Capabilities.APIVersions.Has "security.openshift.io/v1" }}
{{- else }}{{ .Values.platformAssignsUser }}{{ end }}
{{- end }}

{{/* By digest, if the values have one; a digest in the place of the tag is taken for what it is. */}}
{{- define "outrider.operatorImage" -}}
{{- with .Values.operator.image }}
{{- $tag := .tag | default $.Chart.AppVersion }}
{{- $digest := .digest | default (hasPrefix "sha256:" $tag | ternary $tag "") }}
{{- .repository }}{{ if $digest }}@{{ $digest }}{{ else }}:{{ $tag }}{{ end }}
{{- end }}
{{- end }}
